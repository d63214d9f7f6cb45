"""A checkpoint is what its table says: positions and point come back as they were."""

from headrace.connectors.checkpoints import CheckpointFile, CheckpointTable
from headrace.trainers.checkpoint import Checkpoint, Positions, Save
from headrace.trainers.lineage import Point


def test_a_table_gives_the_point_and_the_positions_back() -> None:
    table = CheckpointTable(
        lineage=2, batch=30, version=33, manifests=7, lanes={0: 40, 11: 2}, written_ms=5,
        files={"state-00000.safetensors": CheckpointFile(12, "ab")},
    )  # fmt: skip
    found = Checkpoint.of("here", CheckpointTable.parse(table.to_bytes(), "here"))
    assert (found.point, found.point.version) == (Point(lineage=2, batch=30, version=33), 33)
    assert found.positions == Positions(manifests=7, lanes={0: 40, 11: 2})
    assert (found.table, found.where) == (table, "here")
    assert Save(table.name, "1") != Save(table.name, "2"), "two attempts at one batch share nothing"
