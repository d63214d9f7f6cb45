"""What share of each tensor a version changed: the sparsity that deltas live from, as manifests record it.

Goes in: a manifest and its layout; comes out: shares by tensor, or by role (a tensor's name without layer numbers).
"""

import re

from headrace.schemas.delta_layout import Layout
from headrace.schemas.delta_manifest import WeightManifest

__all__ = ("changed_by_role", "changed_by_tensor", "role_of")

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def role_of(name: str) -> str:
    """A tensor's name with its layer and expert numbers as ``*``.

    >>> role_of("model.layers.17.mlp.up_proj.weight")
    'model.layers.*.mlp.up_proj.weight'
    """
    return _NUMBER.sub("*", name)


def changed_by_tensor(manifest: WeightManifest, layout: Layout) -> dict[str, float]:
    """Changed elements / elements against the parent, by tensor (1.0 for a first version)."""
    rows = zip(layout.tensors, manifest.changed, strict=True)
    return {tensor.name: changed / max(1, tensor.size) for tensor, changed in rows}


def changed_by_role(manifest: WeightManifest, layout: Layout) -> dict[str, float]:
    """The same over all tensors of a role: layers together."""
    sums: dict[str, tuple[int, int]] = {}
    for tensor, changed in zip(layout.tensors, manifest.changed, strict=True):
        before = sums.get(role_of(tensor.name), (0, 0))
        sums[role_of(tensor.name)] = (before[0] + changed, before[1] + tensor.size)
    return {role: changed / max(1, size) for role, (changed, size) in sums.items()}
