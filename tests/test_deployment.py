"""What deploys a cluster is accepted by the programs that read it."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.deployment_tools import PLACE
from txmq.cli.app import command_line
from txmq.config.broker import load_broker
from txmq.testing.wait import PATIENCE_S

ROOT = Path(__file__).parents[1]
CHART, CONTAINER = ROOT / "packaging" / "helm" / "txmq", ROOT / "packaging" / "container"
SCHEMAS = ("service-v1", "poddisruptionbudget-policy-v1", "job-batch-v1", "statefulset-apps-v1")
KUBERNETES = ("1.27.0", "1.37.0")  # the oldest that the chart names, and a new one
SETS = (
    "",
    "nodes=5,image.tag=0.2.0,storage.className=fast,create.enabled=false",
    "tlsSecret=certificates,env[0].name=PGPASSWORD,env[0].value=x,nodeSelector.disk=ssd",
)
pytestmark = pytest.mark.skipif(
    not PLACE.exists(), reason="no helm: `python -m tests.deployment_tools` needs Go"
)


def run(program: str, *args: str, text: str = "") -> str:
    command = [str(PLACE / program), *args]
    ran = subprocess.run(
        command, input=text, capture_output=True, check=False, text=True, timeout=PATIENCE_S
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def render(values: str = "", version: str = KUBERNETES[0]) -> str:
    # Built by Go alone, helm takes its Kubernetes for an old one.
    options = ("--namespace=shop", f"--kube-version={version}", f"--set={values}")
    return run("helm", "template", "broker", str(CHART), *options)


def conform(rendered: str, version: str, folder: Path) -> str:
    """Return what kubeconform says by the schemas of a version, copied to a folder."""
    spec = find_spec("kubernetes_validate")
    assert spec is not None
    assert spec.origin is not None
    whole = Path(spec.origin).parent / "kubernetes-json-schema" / f"v{version}-local-strict"
    for name in ("_definitions", *SCHEMAS):
        text = (whole / f"{name}.json").read_text()
        for server in ("https://kubernetes.io/api/", "/api/"):  # they point there
            text = text.replace(f'"{server}', f'"file://{folder}/')
        (folder / f"{name}.json").write_text(text)
    where = f"{folder}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"
    return run("kubeconform", "-strict", "-summary", "-schema-location", where, text=rendered)


def test_helm_finds_no_mistake() -> None:
    run("helm", "lint", "--strict", str(CHART))


@pytest.mark.parametrize("values", SETS)
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_knows_all_that_is_rendered(values: str, version: str, tmp_path: Path) -> None:
    said = conform(render(values, version), version, tmp_path)
    kinds = 3 if "create.enabled=false" in values else 4
    assert f"{kinds} resources found" in said
    assert f"Valid: {kinds}, Invalid: 0, Errors: 0, Skipped: 0" in said


def test_a_field_that_kubernetes_does_not_know_is_found(tmp_path: Path) -> None:
    rendered = render().replace("maxUnavailable:", "mostUnavailable:")
    with pytest.raises(AssertionError, match="mostUnavailable"):
        conform(rendered, KUBERNETES[0], tmp_path)


def test_a_value_that_the_chart_does_not_know_is_refused() -> None:
    with pytest.raises(AssertionError, match="node"):
        render("node=3")


def test_nodes_are_started_with_options_that_there_are() -> None:
    text = render("tlsSecret=certificates")
    broker = command_line().commands["broker"]  # type: ignore[attr-defined]
    options = {option for parameter in broker.params for option in parameter.opts}
    given = re.findall(r"- (--[a-z-]+)=", text)
    assert len(given) == 6
    assert set(given) <= options
    assert "--advertise=$(NODE).broker.shop.svc:7650" in text
    assert text.count("scheme: HTTPS") == 3
    for file in ("tls.crt", "tls.key"):
        assert f"/etc/txmq/tls/{file}" in (CHART / "values.yaml").read_text()


@pytest.mark.parametrize("name", ["compose.yml", "cluster.yml"])
def test_compose_reads_its_files(name: str) -> None:
    assert "services:" in run("cmd", str(CONTAINER / name))


def test_the_settings_of_composed_nodes_are_valid() -> None:
    text = (CONTAINER / "cluster.yml").read_text()
    nodes = re.findall(r'--name, (node-\d), --advertise, "([\d.:]+)"', text)
    assert len(nodes) == 3
    for name, address in nodes:
        options: dict[str, object] = {"name": name}
        settings = load_broker(CONTAINER / "node.toml", options, advertise=address)
        assert settings.cluster is not None
        assert settings.cluster.advertise == address
        assert f'"{address}:7650"' in text  # it is published there
