"""``farm manifests``: what a cluster needs, for people to read and apply."""

from __future__ import annotations

import json
from pathlib import Path

import click

from farm.cli import one_line_errors


@click.command()
@click.option("--run", "run_path", type=click.Path(path_type=Path), required=True,
              help="Run folder as the pods see it, below cluster.kubernetes.mount.")  # fmt: skip
@click.option("--config", "config_path", type=click.Path(path_type=Path), required=True,
              help="The farm's TOML file; [cluster.kubernetes] names the image.")  # fmt: skip
@one_line_errors
def manifests(run_path: Path, config_path: Path) -> None:
    """Print the Kubernetes objects of a farm that runs in the cluster, as YAML for `kubectl apply -f -`.

    Checked against the published schemas; not run on a cluster."""
    import yaml

    from farm.cluster.kubernetes_pods import inside
    from farm.cluster.kubernetes_pods import manifests as made
    from farm.config import load_config
    from farm.errors import UsageError

    config = load_config(config_path, overrides={"cluster": {"kind": "kubernetes", "address": ""}}).cluster.kubernetes
    if not inside(run_path, config.mount):
        raise UsageError(
            f"--run {run_path}: is not below cluster.kubernetes.mount {config.mount!r}, so no pod sees it; give a "
            "folder there"
        )
    objects = made(config, run=str(run_path), toml=config_path.read_text(encoding="utf-8"))
    plain = json.loads(json.dumps(objects))  # nothing shared, or YAML would write references
    click.echo(yaml.safe_dump_all(plain, sort_keys=False), nl=False)
