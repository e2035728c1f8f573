"""Programs that read what deploys a cluster: helm, kubeconform and compose's parser.

    python -m tests.deployment_tools

builds them by Go into `.cache/deployment`, once; `make deep` does so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

PLACE: Final = Path(__file__).parents[1] / ".cache" / "deployment"
# Each is the last part of its path in PLACE; compose's is the command of its library.
PROGRAMS: Final = {
    "helm": "helm.sh/helm/v3/cmd/helm@v3.19.5",
    "kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform@v0.7.0",
    "cmd": "github.com/compose-spec/compose-go/v2/cmd@v2.9.0",
}


def build() -> None:
    """Build the programs, all or nothing."""
    new = PLACE.with_name("deployment-new")
    for place in (new, PLACE):
        shutil.rmtree(place, ignore_errors=True)
    new.mkdir(parents=True)
    for module in PROGRAMS.values():
        environment = os.environ | {"GOBIN": str(new), "GOFLAGS": "-mod=mod"}
        subprocess.run(["go", "install", module], env=environment, check=True)
    new.replace(PLACE)


if __name__ == "__main__":
    build()
