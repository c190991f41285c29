"""Fetches the releases in test/trainers/wheels.json, without their dependencies, into build/wheels/NAME.

    python scripts/wheels.py [--newest] [NAME...]

`pip download` checks each wheel's SHA-256, and only the Python sources and the metadata are kept: a vLLM wheel has
hundreds of MB of kernels. Wheels of the same version that are already there are kept. --newest fetches the newest
releases, unchecked, into build/wheels-newest/NAME.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIST = ROOT / "test/trainers/wheels.json"
STAMP = ".wheel"
# The same file on every machine, whatever its processor and its Python: nothing compiled is kept.
PLATFORMS = ["manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux1_x86_64", "any"]
TARGET = ["--only-binary=:all:", "--python-version=3.11", "--implementation=cp"]
TARGET += [f"--abi={abi}" for abi in ("cp311", "abi3", "none")] + [f"--platform={tag}" for tag in PLATFORMS]


def download(requirement, folder, *flags):
    listed = folder / "requirements.txt"
    listed.write_text(requirement + "\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", *TARGET, *flags]
    done = subprocess.run([*command, "-d", folder, "-r", listed], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"scripts/wheels.py: pip download {requirement}: {done.stderr.strip()}")
    return next(folder.glob("*.whl"))


def unpack(wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.endswith(".py") or ".dist-info/" in member.filename:
                # Some wheels keep their packages in NAME.data/purelib, which pip leaves out of the path too.
                member.filename = re.sub(r"^[^/]+\.data/(pure|plat)lib/", "", member.filename)
                archive.extract(member, folder)


def fetch(name, pinned, into):
    """`pinned`: its version and SHA-256, or None for the newest release."""
    target = into / name
    stamp = target / STAMP
    wanted = pinned and f"{name} {pinned['version']} {pinned['sha256']}"
    as_installed = not any(target.glob("*.data/*lib"))
    if wanted is not None and stamp.exists() and stamp.read_text() == wanted and as_installed:
        return f"{name} {pinned['version']}: there"
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        scratch = pathlib.Path(scratch)
        exact = pinned and f"{name}=={pinned['version']} --hash=sha256:{pinned['sha256']}"
        wheel = download(name, scratch) if exact is None else download(exact, scratch, "--require-hashes")
        version = wheel.name.split("-")[1]
        unpack(wheel, scratch / "unpacked")
        (scratch / "unpacked" / STAMP).write_text(wanted or f"{name} {version}")
        shutil.rmtree(target, ignore_errors=True)
        (scratch / "unpacked").rename(target)
    return f"{name} {version}: fetched"


def main():
    pinned = json.loads(LIST.read_text())
    parser = argparse.ArgumentParser(description="fetches the released trainers' packages that the tests run against")
    parser.add_argument("--newest", action="store_true", help="the newest releases, not the pinned ones")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(pinned)}; all of them by default")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.names if name not in pinned]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not in {LIST.relative_to(ROOT)}, which has {', '.join(pinned)}")
    into = ROOT / "build" / ("wheels-newest" if chosen.newest else "wheels")
    for name in chosen.names or pinned:
        print(fetch(name, None if chosen.newest else pinned[name], into), flush=True)


if __name__ == "__main__":
    main()
