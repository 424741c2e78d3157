"""What every block of the Fisher keeps."""

from collections.abc import Mapping

from gramian.curvature.blocks import Spec
from gramian.curvature.moments import Keep
from gramian.curvature.options import Options
from gramian.curvature.policy import keep_for

Keeps = Mapping[str, Mapping[str, Keep]]
"""{block: {"A", "G" and, of a table, "table": what is kept of it}}."""


def keeps_of(specs: Mapping[str, Spec], options: Options, head: str | None, exact_head: bool) -> Keeps:
    """What every K-FAC block keeps while tokens arrive."""
    found: dict[str, Mapping[str, Keep]] = {}
    for name, spec in specs.items():
        if spec.kind == "kronecker":
            is_head = head in spec.layers
            rows = spec.inputs if spec.layout != "table" else spec.outputs
            found[name] = {
                "A": keep_for("A", spec.inputs, is_head, options),
                "G": keep_for("G", spec.outputs, is_head, options),
                "table": keep_for("G", rows, False, options),
            }
    return found
