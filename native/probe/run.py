"""Runs all probes and prints their answers as one table of docs/gpu-probes.md.

usage: run.py [--build]       --build only compiles the probes into build/probe (needs nvcc, no GPU)

Uses the programs in build/probe as they are, and compiles missing ones first. Exits with 1 if a probe failed.
"""

import datetime
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build/probe"
PROGRAMS = ["vmm", "ipc", "launch", "bandwidth", "fault"]
LIMIT_S = 180


def compiler():
    for folder in [*os.environ.get("PATH", "").split(":"), "/usr/local/cuda/bin"]:
        if found := shutil.which("nvcc", path=folder):
            return found
    sys.exit("nvcc was not found on PATH nor in /usr/local/cuda/bin: install the CUDA toolkit, or copy a build/probe")


def build(again):
    BUILD.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        if again or not (BUILD / name).exists():
            archs = os.environ.get("REFIT_CUDA_ARCHS", "90")
            targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs.replace(",", " ").split()]
            flags = ["-std=c++20", "-O3", *targets, "-Xcompiler", "-Wall,-Wextra"]
            subprocess.run([compiler(), *flags, "-o", BUILD / name, HERE / f"{name}.cu"], check=True)


def gpu():
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return "; ".join(subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines())
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown GPU ({error})"


def main():
    build(again="--build" in sys.argv)
    if "--build" in sys.argv:
        return
    commands = [[BUILD / name] for name in PROGRAMS]
    commands.append([sys.executable, HERE / "torch_segments.py", BUILD / "ipc"])
    rows, failed = [], []
    for command in commands:
        name = command[-1].name if len(command) == 1 else command[1].name
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired as stopped:
            output = (stopped.stdout or b"").decode()
            done = subprocess.CompletedProcess(command, 124, output, f"still running after {LIMIT_S} s\n")
        rows += [line for line in done.stdout.splitlines() if line.startswith("| ")]
        if done.returncode != 0:
            failed.append(name)
            rows.append(f"| {name} | | FAILED ({done.returncode}): {' '.join(done.stderr.split())[-300:]} |")
        sys.stderr.write(done.stderr)
    print(f"{datetime.date.today()} · {gpu()} · `python3 native/probe/run.py`\n")
    print("| probe | question | answer |\n| --- | --- | --- |")
    print("\n".join(rows))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
