"""`headrace deltas`: the weight versions of a run, from its folder or straight from the object store.

A run folder or a store URL in; tables, JSON, a verdict (exit 1 on a version that cannot be rebuilt) or a Hugging Face
checkpoint of any version out. Nothing here writes to the store; what does is in ``delta_upkeep``.
"""

import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.pipeline.cli.arguments import Format, Output, command_group, print_json, print_table
from headrace.pipeline.cli.delta_place import Place, Policy, RunId, Where, number_of, place_of
from headrace.pipeline.cli.delta_upkeep import compact, merge, prune
from headrace.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from headrace.schemas.delta_manifest import WeightManifest

__all__ = ("app",)

app = command_group("Weights in the object store: list, show, verify, export, merge, compact, prune.")
for _command in (merge, compact, prune):
    app.command()(_command)

Version = Annotated[int, typer.Argument(help="The version; -1 is the newest.")]


@app.command("list")
def list_versions(where: Where, run: RunId = "", policy: Policy = "", output: Output = Format.text) -> None:
    """All committed versions, oldest first: sizes, changed share, digests."""
    from headrace.connectors.stores.chain import Chain

    place = place_of(where, run, policy)
    chain = Chain(place.store, place.run, place.policy)
    numbers = chain.versions()
    links = chain.links(numbers)
    floor = chain.pruned_below()
    spared = chain.spared_below(floor)
    if len(links) < len(numbers):
        unreadable = len(numbers) - len(links)
        sys.stderr.write(f"{unreadable} manifests cannot be read; `headrace deltas verify` says why\n")
    rows = []
    for link in links:
        version = link.manifest.committed(chain.keys, link.sha256)
        pruned = version.version < floor and version.version not in spared
        rows.append((version, pruned, "pruned" if pruned else "+".join(_kinds(link.manifest))))
    if output is Format.json:
        print_json([{**asdict(version), "pruned": pruned} for version, pruned, _ in rows])
        return
    table = [
        (
            v.version, v.lineage, v.batch, what, v.size, f"{v.changed_share:.3%}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(v.published_ms / 1000)), v.root_digest[:16],
        )
        for v, _, what in rows
    ]  # fmt: skip
    print_table(("version", "lineage", "batch", "kind", "bytes", "changed", "published", "root digest"), table)


def _kinds(manifest: "WeightManifest") -> list[str]:
    return [kind for kind in ("delta", "full") if getattr(manifest, kind)]


@app.command()
def show(
    where: Where, version: Version = -1, run: RunId = "", policy: Policy = "", output: Output = Format.text
) -> None:
    """One version: its manifest, its objects, and the share of changed elements of every tensor."""
    from headrace.connectors.stores.chain import Chain

    place = place_of(where, run, policy)
    chain = Chain(place.store, place.run, place.policy)
    committed = chain.committed(number_of(chain, version, place))
    manifest = chain.link(committed.version).manifest
    tensors = chain.layout(manifest.layout_digest).tensors
    changed = [
        {"tensor": t.name, "dtype": t.dtype, "shape": list(t.shape), "changed": count, "share": count / max(1, t.size)}
        for t, count in zip(tensors, manifest.changed, strict=True)
    ]
    if output is Format.json:
        objects = {"delta": [asdict(ref) for ref in manifest.delta], "full": [asdict(ref) for ref in manifest.full]}
        print_json({**asdict(committed), "objects": objects, "tensors": changed})
        return
    for name, value in asdict(committed).items():
        sys.stdout.write(f"{name:16} {value}\n")
    for ref in (*manifest.delta, *manifest.full):
        sys.stdout.write(f"{'object':16} {ref.key} ({ref.nbytes} bytes)\n")
    sys.stdout.write("\n")
    rows = [
        (t.name, t.dtype, "x".join(map(str, t.shape)), f"{row['share']:.3%}")
        for t, row in zip(tensors, changed, strict=True)
    ]
    print_table(("tensor", "dtype", "shape", "changed"), rows)


@app.command()
def sparsity(where: Where, run: RunId = "", policy: Policy = "", output: Output = Format.text) -> None:
    """The share of weights that every version changed, by role of the tensors; as JSON also by tensor."""
    from headrace.connectors.stores.chain import Chain
    from headrace.connectors.stores.sparsity import changed_by_role, changed_by_tensor

    place = place_of(where, run, policy)
    chain = Chain(place.store, place.run, place.policy)
    links = [link for link in chain.links(chain.versions()) if link.manifest.parent >= 0]
    tables = [chain.layout(link.manifest.layout_digest) for link in links]
    both = [(link.manifest, table) for link, table in zip(links, tables, strict=True)]
    if output is Format.json:
        print_json(
            [
                {"version": m.version, "roles": changed_by_role(m, t), "tensors": changed_by_tensor(m, t)}
                for m, t in both
            ]
        )
        return
    roles = sorted({role for m, t in both for role in changed_by_role(m, t)})
    rows = [
        (m.version, f"{sum(m.changed) / max(1, m.elements):.3%}", *(f"{shares.get(role, 0):.3%}" for role in roles))
        for m, t in both
        for shares in [changed_by_role(m, t)]
    ]
    print_table(("version", "all", *roles), rows)


@app.command()
def verify(where: Where, run: RunId = "", policy: Policy = "", output: Output = Format.text) -> None:
    """Rebuild every version from every object that leads to it and compare digests; exit 1 if one fails."""
    from headrace.pipeline.delta_to_worker import verify_chain

    place = place_of(where, run, policy)
    checked = verify_chain(place.store, place.run, place.policy)
    bad = [one for one in checked if one.problem]
    if output is Format.json:
        print_json([{**asdict(one), "root_digest": one.root_digest} for one in checked])
    else:
        rows = [(one.version, "+".join(one.ways), one.root_digest[:16], one.problem or "ok") for one in checked]
        print_table(("version", "rebuilt from", "root digest", "verdict"), rows)
        sys.stdout.write(f"{len(checked)} versions, {len(bad)} with a problem\n")
    if bad:
        raise typer.Exit(1)


@app.command()
def export(
    where: Where,
    target: Annotated[Path, typer.Argument(help="The folder to write; must be empty or missing.")],
    version: Annotated[int, typer.Option(help="The version; -1 is the newest.")] = -1,
    model: Annotated[Path | None, typer.Option(help="Model folder with configuration and tokenizer.")] = None,
    run: RunId = "",
    policy: Policy = "",
) -> None:
    """Write a version as a Hugging Face checkpoint."""
    from headrace.connectors.adapters import holds_adapters
    from headrace.connectors.checkpoint_file import check_target, write_checkpoint
    from headrace.connectors.stores.chain import Chain
    from headrace.pipeline.delta_to_worker import WeightReader

    place = place_of(where, run, policy)
    check_target(target)
    reader = WeightReader(place.store, place.run, place.policy)
    reader.fetch(number_of(Chain(place.store, place.run, place.policy), version, place))
    snapshot = reader.snapshot()
    head = snapshot.version
    if holds_adapters(snapshot.weights):
        _export_with_adapters(place, head.version, target, model)
        return
    told = {"run": head.run, "policy": head.policy, "version": str(head.version), "root_digest": head.root_digest}
    folder = model or place.model
    try:
        write_checkpoint(target, snapshot.layout, snapshot.weights, folder, told)
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written: {error.strerror or error}") from error
    beside = f" with configuration and tokenizer of {folder}" if folder else " (weights alone: name --model)"
    sys.stdout.write(f"version {head.version} of {head.run}/{head.policy} written to {target}{beside}\n")


def _export_with_adapters(place: Place, version: int, target: Path, model: Path | None) -> None:
    """The trained model with its adapters added in, and the adapters alone beside it (``trainers.export``)."""
    if place.folder is None or model is not None:
        raise ConfigurationError(
            f"version {version} of {place.run}/{place.policy} holds adapters alone: name the run's folder, without "
            "--model, so that they are added to the model that they were trained on"
        )
    words = ["--config", str(place.folder / "config.json"), "--policy", place.policy, "--version", str(version)]
    done = subprocess.run([sys.executable, "-m", "headrace.trainers.export", *words, "--target", str(target)])
    if done.returncode:
        raise typer.Exit(done.returncode)
    sys.stdout.write(f"version {version} of {place.run}/{place.policy} written to {target}, its adapters added in\n")
