"""How the shims get into verl and OpenRLHF: with packages that have their layout, without an installation."""

import os
import subprocess
import sys
import textwrap
import types

import pytest
from conftest import ROOT

CLIENTS = str(ROOT / "clients/python")
sys.path.insert(0, CLIENTS)
import refit_openrlhf  # noqa: E402


def tree(folder, **files):
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    for parent in {parent for path in folder.rglob("*.py") for parent in path.parents if folder in parent.parents}:
        (parent / "__init__.py").touch()


def run_in(folder, *arguments, **environment):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), CLIENTS]), **environment}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_openrlhf_finds_the_function_where_its_program_imports_it(tmp_path):
    """As in OpenRLHF, the package imports the function from its module, and the program imports it from the package."""
    tree(
        tmp_path,
        openrlhf__trainer__ray__vllm_engine="def create_vllm_engines(*args, **options): raise AssertionError('vLLM')",
        openrlhf__cli__train_ppo_ray="""
            import sys
            from openrlhf.trainer.ray import create_vllm_engines
            print(create_vllm_engines.__module__, *sys.argv[1:])
        """,
    )
    (tmp_path / "openrlhf/trainer/ray/__init__.py").write_text("from .vllm_engine import create_vllm_engines\n")
    assert run_in(tmp_path, "-m", "refit_openrlhf", "--vllm.num_engines", "2") == [
        "refit_openrlhf",
        "--vllm.num_engines",
        "2",
    ]


def test_openrlhf_calls_its_function_by_position(monkeypatch):
    """The eleventh argument tells whether engines sleep from the start."""
    slept, made = [], []

    class Handle:
        sleep = types.SimpleNamespace(remote=lambda: slept.append(1))

    def options(**_):
        return types.SimpleNamespace(remote=lambda **about: made.append(about) or Handle())

    monkeypatch.setitem(
        sys.modules, "ray", types.SimpleNamespace(remote=lambda _: types.SimpleNamespace(options=options), get=list)
    )
    monkeypatch.setenv("REFIT_URLS", "http://a:1,http://b:2")
    settings = (2, 1, "org/model", 42, False, True, False, 4096, None, 0.9)
    for sleeps in (False, True):
        engines = refit_openrlhf.create_vllm_engines(
            *settings, sleeps, None, agent_func_path=None, remote_rm_url="http://r", max_images_per_prompt=0
        )
        assert len(engines) == 2 and len(slept) == (2 if sleeps else 0)
    assert made[0] == dict(url="http://a:1", agent_func_path=None, remote_rm_url="http://r")
    with pytest.raises(ValueError, match="2 servers for 3"):
        refit_openrlhf.create_vllm_engines(3)


def test_verl_finds_the_replica_by_an_environment_variable(tmp_path):
    """verl/__init__.py imports the modules in $VERL_USE_EXTERNAL_MODULES in each process.

    The registry has verl's calls.
    """
    tree(
        tmp_path,
        verl__workers__rollout__replica="""
            class RolloutReplicaRegistry:
                known = {"sglang": "verl's", "vllm": "verl's"}

                @classmethod
                def register(cls, name, loader):
                    cls.known[name] = loader.__module__
        """,
    )
    (tmp_path / "verl/__init__.py").write_text(
        "import importlib, os\n"
        "names = os.environ['VERL_USE_EXTERNAL_MODULES'].split(',')\n"
        "[importlib.import_module(name) for name in names if name]\n"
    )
    asked = (
        "import verl, verl.workers.rollout.replica as replica; print(*replica.RolloutReplicaRegistry.known.values())"
    )
    assert run_in(tmp_path, "-c", asked, VERL_USE_EXTERNAL_MODULES="json,refit_verl") == ["refit_verl", "refit_verl"]
    assert run_in(tmp_path, "-c", asked, VERL_USE_EXTERNAL_MODULES="json") == ["verl's", "verl's"]
