"""Build the released Horovod against the torch and TensorFlow of this environment, and install it.

Horovod's last release predates today's frameworks. Its source distribution is downloaded, checked against a known
hash, given the edits listed in EDITS (each must match exactly once, or the build stops), built into a wheel, and the
wheel is kept outside the clone, in a folder named by everything that it was built from. A second call with the same
ingredients only installs that wheel.

Run with the Python of the environment that is to receive Horovod; torch, TensorFlow, setuptools, wheel and cmake must
be there already. All HOROVOD_* variables pass through to Horovod's build (HOROVOD_GPU_OPERATIONS=NCCL, for example)
and are part of the key. What this script does not do: install system packages (scripts/system_packages.sh does).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


@dataclass(frozen=True)
class Edit:
    """Replace `old`, which must occur exactly once in `path`, by `new`."""

    path: str
    old: str
    new: str
    why: str


EDITS = (
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 17)",
        "the headers of current torch and TensorFlow need C++17",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 17)",
        "the headers of current torch need C++17",
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")',
        "",
        "it includes XLA headers that TensorFlow's wheel no longer ships",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), help="folder of built wheels (default: %(default)s)"
    )
    parser.add_argument("--constraints", type=Path, help="pip constraints file for Horovod's own requirements")
    arguments = parser.parse_args()

    options = build_options()
    ingredients = build_ingredients(options)
    folder = arguments.cache / key_of(ingredients)
    with alone(folder):
        wheel = cached_wheel(folder)
        if wheel is None:
            say(f"building Horovod {VERSION} for {describe(ingredients)} (about five minutes)")
            wheel = build(folder, ingredients, options)
    say(f"wheel: {wheel}")
    install(wheel, arguments.constraints)


def say(text: str) -> None:
    print(f"build_horovod: {text}", flush=True)


def fail(text: str) -> None:
    raise SystemExit(f"build_horovod: {text}")


def default_cache() -> Path:
    """The folder that holds built wheels, outside any clone."""
    chosen = os.environ.get("HVD_GRADCOMP_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_gradcomp" / "horovod"


def build_options() -> dict[str, str]:
    """The HOROVOD_* variables of the build: the caller's, over the defaults of this project."""
    options = {"HOROVOD_WITH_GLOO": "1", "HOROVOD_WITHOUT_MXNET": "1"}
    for package, name in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW")):
        options[f"HOROVOD_WITH{'' if framework_version(package) else 'OUT'}_{name}"] = "1"
    if shutil.which("mpicxx"):
        options["HOROVOD_WITH_MPI"] = "1"
    else:
        say("no Open MPI here (mpicxx not found): building with Gloo only; `horovodrun --gloo` works, mpirun does not")
        options["HOROVOD_WITHOUT_MPI"] = "1"
    chosen = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    for name in chosen:
        # HOROVOD_WITH_X and HOROVOD_WITHOUT_X exclude each other: the caller's word replaces our default.
        if name.startswith("HOROVOD_WITHOUT_"):
            options.pop(name.replace("WITHOUT", "WITH", 1), None)
        elif name.startswith("HOROVOD_WITH_"):
            options.pop(name.replace("WITH", "WITHOUT", 1), None)
    return options | chosen


def framework_version(package: str) -> str | None:
    """The installed version of torch or TensorFlow (under any of its distribution names), or None."""
    names = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu")}[package]
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def build_ingredients(options: dict[str, str]) -> dict[str, object]:
    """Everything that a built wheel depends on: two equal results may share one wheel."""
    frameworks = [version for version in map(framework_version, ("torch", "tensorflow")) if version]
    if not frameworks:
        fail("neither torch nor TensorFlow is installed here; install at least one of them first")
    return {
        "horovod": f"{VERSION} {SHA256}",
        "edits": [[edit.path, edit.old, edit.new] for edit in EDITS],
        "frameworks": frameworks,
        "python": f"{platform.python_implementation()} {platform.python_version()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "compiler": first_line("c++", "--version"),
        "mpi": first_line("mpirun", "--version") if "HOROVOD_WITH_MPI" in options else "none",
        "nvcc": last_line("nvcc", "--version") if "HOROVOD_GPU_OPERATIONS" in options else "none",
        "options": dict(sorted(options.items())),
    }


def first_line(*command: str) -> str:
    return (output_lines(*command) or ["missing"])[0]


def last_line(*command: str) -> str:
    return (output_lines(*command) or ["missing"])[-1]


def output_lines(*command: str) -> list[str]:
    if not shutil.which(command[0]):
        return []
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()


def key_of(ingredients: dict[str, object]) -> str:
    text = json.dumps(ingredients, sort_keys=True)
    return f"{VERSION}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def describe(ingredients: dict[str, object]) -> str:
    frameworks = ", ".join(str(name) for name in ingredients["frameworks"])  # type: ignore[attr-defined]
    return f"{frameworks}, MPI: {ingredients['mpi']}"


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache folder: two clones that need the same wheel build it once, not twice at a time."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cached_wheel(folder: Path) -> Path | None:
    wheels = sorted(folder.glob("*.whl"))
    return wheels[0] if wheels else None


def build(folder: Path, ingredients: dict[str, object], options: dict[str, str]) -> Path:
    """Download, edit and build; only a finished wheel reaches the cache, in one rename."""
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder.parent) as scratch_name:
        scratch = Path(scratch_name)
        source = unpack(download(scratch), scratch)
        apply_edits(source)
        wheels = scratch / "wheel"
        log = scratch / "build.log"
        with log.open("w") as sink:
            command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-v"]
            built = subprocess.run(
                [*command, "-w", str(wheels), str(source)],
                env={**os.environ, **options, "PATH": venv_path(), "MAKEFLAGS": parallel_make()},
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        if built.returncode:
            kept = folder.parent / f"{folder.name}.failed.log"
            shutil.copy(log, kept)
            print("\n".join(log.read_text(errors="replace").splitlines()[-40:]))
            fail(f"Horovod did not build; the whole log is in {kept}")
        (wheels / "ingredients.json").write_text(json.dumps(ingredients, indent=2, sort_keys=True) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        wheels.rename(folder)
    wheel = cached_wheel(folder)
    if wheel is None:
        fail(f"the build ended without an error but left no wheel in {folder}")
    assert wheel is not None
    return wheel


def venv_path() -> str:
    """PATH with this environment's programs (cmake) first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def parallel_make() -> str:
    return os.environ.get("MAKEFLAGS") or f"-j{len(os.sched_getaffinity(0))}"


def download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
    # Reading the metadata runs Horovod's setup.py, which looks for cmake on PATH.
    run = subprocess.run(
        [*command, "-q", "-d", str(scratch), f"horovod=={VERSION}"], env={**os.environ, "PATH": venv_path()}
    )
    if run.returncode:
        fail(f"the source distribution of Horovod {VERSION} could not be downloaded: see pip's message above")
    archive = scratch / f"horovod-{VERSION}.tar.gz"
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        fail(f"{archive.name} has SHA-256 {found}, expected {SHA256}: not the released source, refusing to build it")
    return archive


def unpack(archive: Path, scratch: Path) -> Path:
    with tarfile.open(archive) as tar:
        # Python 3.11.2, which is Debian 12's, has no filters yet; the hash has already vouched for the content.
        tar.extractall(scratch, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return scratch / f"horovod-{VERSION}"


def apply_edits(source: Path) -> None:
    """Apply EDITS to the unpacked source; stop where it does not look as expected."""
    for edit in EDITS:
        path = source / edit.path
        text = path.read_text() if path.exists() else ""
        count = text.count(edit.old)
        if count != 1:
            fail(f"{edit.path}: expected {edit.old!r} once, found it {count} times; the edit ({edit.why}) was not made")
        path.write_text(text.replace(edit.old, edit.new))


def install(wheel: Path, constraints: Path | None) -> None:
    if is_installed(wheel):
        say("that wheel is installed already")
        return
    command = [sys.executable, "-m", "pip", "install", "-q"]
    if constraints:
        command += ["-c", str(constraints)]
    # The wheel of one version may have been built anew (other frameworks, other options): always put this one in.
    subprocess.run([*command, str(wheel)], check=True)
    subprocess.run([*command, "--force-reinstall", "--no-deps", str(wheel)], check=True)


def is_installed(wheel: Path) -> bool:
    """Whether the Horovod in place came from this very file; pip writes down what it installed from."""
    try:
        origin = importlib.metadata.distribution("horovod").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    return hashlib.sha256(wheel.read_bytes()).hexdigest() in (origin or "")


if __name__ == "__main__":
    main()
