"""Give a container build this machine's pip settings: write them to a folder and print the volumes that it needs.

A machine behind a mirror or with its own certificates says so in pip's configuration, which a build would not see.
Printed are lines for `buildah build --volume`, read-only: the settings as /etc/pip.conf, and each file and folder that
they name. Nothing of it becomes part of an image. Not for use outside scripts/image_test.sh.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

INSIDE = "/run/pip"


def main() -> None:
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings: dict[str, str] = {}
    volumes: dict[str, str] = {}
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    for line in listed.stdout.splitlines():
        name, _, quoted = line.partition("=")
        option = name.split(".", 1)[-1]
        value = ast.literal_eval(quoted)
        if option == "cert":
            # Not mounted where it lies: the container may install certificates of its own there.
            shutil.copy(value, folder / "cert.pem")
            value = f"{INSIDE}/cert.pem"
        else:
            for word in value.split():
                path = Path(word.removeprefix("file://"))
                if path.is_absolute() and path.exists():
                    # A package index may point to files beside its own folder.
                    root = str(path.parent if path.name == "simple" else path)
                    volumes[root] = root
        settings[option] = value
    text = "".join(f"{option} = {value}\n" for option, value in sorted(settings.items()))
    (folder / "pip.conf").write_text(f"[global]\n{text}")
    volumes |= {str(folder): INSIDE, str(folder / "pip.conf"): "/etc/pip.conf"}
    for outside, inside in volumes.items():
        print(f"{outside}:{inside}:ro")


if __name__ == "__main__":
    main()
