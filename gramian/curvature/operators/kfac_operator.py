"""The Fisher of K-FAC as an operator."""

import torch
from torch import Tensor

from gramian.core.errors import GramianError
from gramian.curvature.blocks.consistency import unique_parameters
from gramian.curvature.blocks.parameter_parts import whole_shapes
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.operators.parameter_space import ParameterSpace, Selection, choose, first_names
from gramian.linalg.spectra.operator import Operator, seen


class KFACOperator(Operator):
    """The K-FAC Fisher F as an operator, block by block: V → G V A for a layer's [weight | bias], exact or diagonal elsewhere.

    It acts on the parameters that have factors, in the model's order, and uses the factors at the time of a product. If only
    the weight of a layer is selected, it uses the part of the layer's block without the bias. A product costs 2(o²m + om²)
    FLOPs for a layer with o outputs and m inputs, and less for low-rank factors. It is collective if factors are sharded.

    ```python
    operator = KFACOperator(kfac, damped=True)
    product_NK = operator.matmat(torch.randn(operator.dim, 2))
    ```
    """

    def __init__(self, kfac: KFACNaturalGradient, damped: bool = False, parameters: Selection = None) -> None:
        """Choose the parameters with factors that the operator acts on.

        Args:
            kfac: a K-FAC object with factors (without: a GramianError).
            damped: multiply by F + damping, clip included, in place of F.
            parameters: names (any name of a tied parameter), or a predicate of (name, tensor of its shape); None: all.
        """
        if not isinstance(kfac, KFACNaturalGradient):
            raise GramianError(f"kfac: {seen(kfac)}; expected a KFACNaturalGradient")
        if not kfac.kfac_factors:
            raise GramianError("kfac: has no factors yet; expected a capture or collect_kfac_factors before")
        specs = [block.spec for block in kfac.kfac_factors.values()]
        shapes = whole_shapes([*kfac.state.specs.values(), *specs])
        known = {name for spec in specs for name in spec.owners}
        shapes = {name: shape for name, shape in shapes.items() if name in known}
        model = kfac.state.model
        order = [*shapes] if model is None else [name for name, _ in unique_parameters(model) if name in shapes]
        dtypes = {spec.dtype for spec in specs}
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.device = specs[0].device
        stand_ins = {name: torch.empty(shapes[name], dtype=self.dtype, device="meta") for name in order}
        chosen = choose(stand_ins, first_names(model, parameters), "with curvature")
        self.space = ParameterSpace({name: shapes[name] for name in chosen}, self.dtype, self.device)
        self.dim, self.kfac, self.damped = self.space.dim, kfac, damped

    def matmat(self, y_NK: Tensor) -> Tensor:
        """F Y for Y [n, k] of any k, column by column: [n, k]; with `damped` (F + damping) Y, clip included."""
        products = []
        for column in self.space.columns(y_NK):
            found = self.kfac.compute_fisher_vector_product(self.space.unflatten(column), damped=self.damped)
            products.append(self.space.flatten({name: found[name] for name in self.space.shapes}))
        return torch.stack(products, dim=1)
