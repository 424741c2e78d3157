"""`KFAC`: an optimizer that brings its own curvature: whitened, orthogonalised steps for weight matrices, AdamW for the rest.

The recipe is the best of those that were searched in `benchmarks/optimizer_recipes.py`; docs/concepts/kfac_optimizer.md says
what each part contributes, and where it stands beside AdamW and Muon.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from gramian.core.errors import GramianError
from gramian.curvature.blocks.block import Block
from gramian.curvature.blocks.block_specs import Spec, find_blocks
from gramian.curvature.blocks.consistency import check_number, unique_parameters
from gramian.curvature.blocks.output_head import compiled_head, known_head, warn_unknown_head
from gramian.curvature.estimate.kfac_capture import IdleCapture, KFACCapture
from gramian.curvature.kfac import KFACNaturalGradient
from gramian.curvature.persist import curvature_record
from gramian.curvature.persist.factor_bytes import most_bytes, to_bytes
from gramian.curvature.refresh.shared_factorisation import SharedRefresh
from gramian.optim.matrix_step import MatrixStep, gradient_part, local_part, weight_part
from gramian.optim.optimizer_options import check_options, listed
from gramian.optim.optimizer_state import FACTORS, asks_for_names, holder, make_state, split_factors
from gramian.optim.recorded_steps import RecordedSteps
from gramian.optim.whitened_blocks import WhitenedBlocks
from gramian.optim.whitened_steps import WhitenedSteps, worth_sharing
from gramian.parallel.exchange import Exchange
from gramian.taps.model.user_names import is_compiled, unwrap
from gramian.taps.products.parts import owner, view


class KFAC(Optimizer):
    """K-FAC as an optimizer: its own curvature, refreshed from the backwards that training runs anyway.

    A weight matrix W of a layer with factors A and G, gradient g and momentum β steps along

        M ← βM + (1−β)g,    N = βM + (1−β)g,    U = P_G · orth(P_G N P_A) · P_A,    W ← W − 4·lr·(0.2·U/rms(U) + decay·W)

    where P_A and P_G are (A/ā + δI)^(−1/4) and (G/ḡ + δI)^(−1/4) of the averaged factors, relative to their mean eigenvalues,
    and orth brings all singular values near 1. The wider factor of a layer is its diagonal. Embeddings, the output layer,
    biases, norms and parameters without factors take AdamW with `lr` in the same step. Biases and norms do not decay.

    ```python
    optimizer = gramian.optim.KFAC(model, lr=3e-3, weight_decay=0.1)
    with optimizer.capture(num_terms=y.numel()):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    ```

    One step costs 36 n³ FLOPs for a square matrix of width n, in float16 on a GPU, and every `update_freq` steps a refresh.
    Memory: one momentum per weight matrix, two moments for everything else, factors of the narrower sides (float32) and their
    roots. A sharded model (FSDP2, tensor parallel) gathers the averaged gradients of one shape at a time; every process
    computes every step, and its share of large roots.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 2.8e-3,
        weight_decay: float = 0.1,
        *,
        params: Iterable[Any] | None = None,
        momentum: float = 0.9,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        damping: float = 0.1,
        update_freq: int = 20,
        ema_decay: float = 0.8,
        max_tokens: int | None = 2048,
        seed: int = 0,
        process_group: Any = None,
    ) -> None:
        """Create the optimizer of a model, after `fully_shard` or DDP.

        Args:
            model: the module that is trained.
            lr: learning rate of AdamW; weight matrices use four times this.
            weight_decay: decoupled decay of parameters of two or more dimensions.
            params: parameters, or groups of them as other optimizers take them, with the keys lr, weight_decay, momentum,
                betas, eps, and kfac (False: AdamW for all of the group); None: all trainable parameters of the model.
            momentum: β of weight matrices.
            betas: decay of AdamW's moments.
            eps: AdamW's constant.
            damping: δ, relative to the mean eigenvalue of each factor.
            update_freq: number of steps from one refresh of the factors to the next.
            ema_decay: decay of the factors' moving average over refreshes.
            max_tokens: size of the random subset of tokens that a refresh uses; None: all.
            seed: seed of these subsets.
            process_group: the processes that share the data; None: those of DDP or FSDP2, else all.

        Raises:
            GramianError: naming an argument that is not allowed, or a parameter that is not the model's.
        """
        if not isinstance(model, nn.Module):
            raise GramianError(f"model: expected an nn.Module, got {type(model).__name__}")
        check_number("damping", damping, "positive")
        self._model = model
        self._names = {id(p): name for name, p in unique_parameters(unwrap(model))}
        self.kfac = KFACNaturalGradient(
            update_freq=update_freq,
            ema_decay=ema_decay,
            max_tokens=max_tokens,
            seed=seed,
            kfac_use_woodbury=False,
            woodbury_dtype="fp64" if any(p.dtype == torch.float64 for p in model.parameters()) else "fp32",
            one_sided=True,
            process_group=process_group,
        )
        """The curvature inside: factors of the weight matrices that take whitened steps, of no other parameter."""
        self._steps, self._blocks, self._recorded = WhitenedSteps(damping), WhitenedBlocks(), RecordedSteps()
        self._chosen_for: tuple[str | None, set[str], dict[str, str]] | None = None
        """(output layer, parameters that may take whitened steps, observed matrices) for which layers were chosen."""
        self._only_names = False
        """True while the state has names without numbers, for `torch.distributed.checkpoint`."""
        self._head_sought = False
        """True once it was looked whether a compiled model hides its output layer."""
        if not any(p.requires_grad for p in model.parameters()):
            raise GramianError("model: has no trained parameter; expected at least one with requires_grad=True")
        given = [p for p in model.parameters() if p.requires_grad] if params is None else listed(params)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "betas": betas,
            "eps": eps,
            "kfac": True,
            "fused": False,
        }
        super().__init__(given, defaults)
        self._choose_layers()
        if not self.kfac.state.only:
            raise GramianError(
                "model: has no trained linear or convolution layer for K-FAC; expected one, or torch.optim.AdamW instead"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters; those that do not train are left out."""
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        for p in group["params"]:
            if id(p) not in self._names:
                raise GramianError(
                    f"params: one of shape {list(p.shape)} is not a parameter of the model; expected the model's own"
                )
        check_options(group)
        trained = [p.requires_grad for p in group["params"]]
        for key in {"params", "param_names"} & group.keys():
            group[key] = list(compress(group[key], trained))
        group["fused"] = all(p.is_cuda for p in group["params"])
        self.param_groups.append(group)
        self._chosen_for = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle has: the model too, whose copy it steps. Operators and recorded steps are made anew."""
        own = ("_model", "kfac", "_chosen_for", "_head_sought", "_only_names")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}, "damping": self._steps.damping}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a copy's fields; `load_state_dict` gives "state" and "param_groups" alone."""
        damping = state.pop("damping", None)
        super().__setstate__(state)
        if damping is not None:
            self._steps, self._blocks, self._recorded = WhitenedSteps(damping), WhitenedBlocks(), RecordedSteps()
            self._names = {id(p): name for name, p in unique_parameters(unwrap(self._model))}

    def capture(self, **arguments: Any) -> "KFACCapture | SharedRefresh | IdleCapture":
        """The context around forward and backward of a step: `KFACNaturalGradient.capture` of the model, with its arguments.

        It refreshes the factors once in `update_freq` steps. In all other steps it does nothing, nor while every weight matrix
        is frozen. Several processes make the operators of large new factors at its end, each the roots of its share.
        """
        self._choose_layers()
        found = self.kfac.capture(self._model, **arguments) if self.kfac.state.only else IdleCapture()
        if isinstance(found, IdleCapture) or found.exchange is None:
            return found
        return SharedRefresh(found, partial(self._share_roots, found.exchange, self.kfac.refreshes))

    def _shares(self, exchange: Exchange | None) -> int:
        """Number of processes that share the roots of the factors."""
        specs = self.kfac.state.specs.values()
        return exchange.size if exchange is not None and worth_sharing(specs, exchange.size) else 1

    @torch.no_grad()
    def _share_roots(self, exchange: Exchange, refreshes: int) -> None:
        """If a refresh is new, make its operators: here and not in `step`, which a process may leave out. Collective."""
        if self.kfac.refreshes > refreshes and self._shares(exchange) > 1:
            self._choose_layers()
            self._steps.make(*self._whitened(self._trained()), exchange)
            self.kfac.state.sent = dict(exchange.sent)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once along the gradients in `p.grad`; `closure`, if given, is called once before and must capture itself.

        Raises a GramianError before the first capture. While there are no factors because the first refresh was dropped, no
        parameter is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.kfac.refreshes and not self.kfac.dropped:
            if asks_for_names(self):
                self._make_names()
                return loss
            raise GramianError("step: no capture has run yet; expected the backward inside optimizer.capture(...)")
        if not self.kfac.refreshes:
            curvature_record.log_no_step(self.kfac.dropped[-1]["reason"])
            return loss
        self._refuse_other_parameters()
        self._choose_layers()
        if self._only_names:
            self.state.clear()
            self._only_names = False
        trained = self._trained()
        whitened, weights = self._whitened(trained)
        owners = {owner(name) for name in whitened}
        for group in self.param_groups:
            live = [p for p in group["params"] if p.grad is not None]
            self._step_adamw(group, [p for p in live if self._names[id(p)] not in owners])
        self._steps.update(whitened, weights, self._shares(self.kfac.state.exchange))
        self._step_matrices(trained, weights)
        self._mark_holder()
        return loss

    def record(self) -> dict[str, Any]:
        """`kfac.record()` with the damping of this optimizer's steps: "relative", λ_A = δā and λ_G = δḡ, and no clip.

        "operators" has precisions, bytes and measured errors of the roots (docs/concepts/kfac_optimizer.md). Collective, as
        `kfac.record`.
        """
        return self._steps.described(self.kfac.record(), self.kfac.kfac_factors)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with the factors as bytes in that of its first parameter, under "kfac".

        Collective if factors are sharded over processes. Their bytes are a copy, on the parameter's device.
        """
        found = super().state_dict()
        states = {key: {n: v for n, v in state.items() if n != FACTORS} for key, state in found["state"].items()}
        self._choose_layers()
        most = most_bytes(self._hidden_blocks({}), self.kfac.options)  # not what was seen: a new one has seen none
        place, parameters = holder(self), [p for group in self.param_groups for p in group["params"]]
        packed = to_bytes(self.kfac.state_dict(), most).to(parameters[place].device)
        states[place] = {**states.get(place, {}), FACTORS: packed}
        return {**found, "state": states}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; a GramianError, and nothing changed, if the factors do not fit the model."""
        for key in ("state", "param_groups"):
            if key not in state_dict:
                raise GramianError(f'state_dict: has no "{key}"; expected the state of a gramian.optim.KFAC')
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        here = [len(group["params"]) for group in self.param_groups]
        if saved != here:
            raise GramianError(f"state_dict: has groups of {saved} parameters; expected {here}, as the optimizer has")
        names = [self._names[id(p)] for group in self.param_groups for p in group["params"]]
        factors, states = split_factors(state_dict, names, holder(self))
        self.kfac.load_state_dict(factors, self._model)
        groups = zip(state_dict["param_groups"], self.param_groups, strict=True)
        given = [{**old, "fused": new["fused"]} for old, new in groups]  # as this device, not the saved one, has it
        super().load_state_dict({"state": states, "param_groups": given})
        self._only_names = False

    def _make_names(self) -> None:
        """Create the state that parameters will have, of zeros; that of both kinds where the first refresh decides."""
        self._choose_layers(traced=True)
        assert self._chosen_for is not None
        kinds = {spec.owners[0]: bool(spec.assumed) for spec in self._hidden_blocks({}).values()}
        for group in self.param_groups:
            for p in group["params"]:
                name, state = self._names[id(p)], self.state[p]
                if name in kinds:
                    make_state(state, p, whitened=True, fused=group["fused"])
                if name not in kinds or kinds[name] or self._chosen_for[0] is None:
                    make_state(state, p, whitened=False, fused=group["fused"])
        self._mark_holder()
        self._only_names = True

    def _mark_holder(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.state[parameters[holder(self)]].setdefault(FACTORS, 0)

    def _refuse_other_parameters(self) -> None:
        """Raise if nothing has a gradient because the model has other parameters now than when the optimizer was created."""
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            return
        if any(id(p) not in self._names for p in unwrap(self._model).parameters()):
            raise GramianError(
                "model: its parameters were replaced after the optimizer was created; expected fully_shard, or whatever "
                "replaced them, before gramian.optim.KFAC(model)"
            )

    # ---- whose step is which -----------------------------------------------------------------------------------------

    def _choose_layers(self, traced: bool = False) -> None:
        """Restrict the curvature to weight matrices that take whitened steps: no embeddings, and not the output layer.

        `traced`: look for the output layer in a forward without numbers, as for a compiled model.
        """
        state, root = self.kfac.state, unwrap(self._model)
        trained = [p for group in self.param_groups if group["kfac"] for p in group["params"] if p.requires_grad]
        wanted = {self._names[id(p)] for p in trained}
        head = self.kfac.head or (None if self._chosen_for is None else self._chosen_for[0])
        unknown = traced and head is None
        if self._chosen_for == (head, wanted, state.observed) and not unknown:  # the model is not walked at every step
            if head is None and self.kfac.refreshes and not self._head_sought:
                self._head_sought = True
                if any(is_compiled(module) for module in self._model.modules()):
                    warn_unknown_head([layer for s in state.specs.values() for layer in s.layers], root)
            return
        head = head or known_head(root, None) or compiled_head(self._model, always=traced)
        self._chosen_for = (head, wanted, state.observed)
        hidden = self._hidden_blocks(state.observed)
        state.only = frozenset(o for s in hidden.values() for o in s.owners[: None if s.assumed else 1])
        rests = self._resting()
        state.blocks = {n: b for n, b in state.blocks.items() if n in hidden or b.spec.owners[0] in rests}

    def _hidden_blocks(self, observed: Mapping[str, str]) -> dict[str, Spec]:
        """{name: block} of the weights that take whitened steps; `observed`: what is known of matrices that are assumed."""
        assert self._chosen_for is not None
        head, wanted, _ = self._chosen_for
        found = find_blocks(unwrap(self._model), self.kfac.options, observed)
        specs = {n: s for n, s in found.items() if s.owners[0] in wanted}
        hidden = {n: s for n, s in specs.items() if s.kind == "kronecker" and not s.tables}
        parameters = [p for group in self.param_groups for p in group["params"]]
        sharded = {self._names[id(p)] for p in parameters if isinstance(p, DTensor)}  # whose parts are no views
        hidden = {n: s for n, s in hidden.items() if s.owners == s.parameters or s.owners[0] not in sharded}
        if len(hidden) > 1 or self._resting():
            hidden = {n: s for n, s in hidden.items() if head not in s.layers}
        return hidden

    def _resting(self) -> set[str]:
        """Names of the parameters that do not train now."""
        return {self._names[id(p)] for group in self.param_groups for p in group["params"] if not p.requires_grad}

    # ---- the two kinds of step ---------------------------------------------------------------------------------------

    def _trained(self) -> dict[str, tuple[nn.Parameter, dict[str, Any]]]:
        return {self._names[id(p)]: (p, group) for group in self.param_groups for p in group["params"]}

    def _whitened(self, trained: Mapping[str, Any]) -> tuple[dict[str, Block], dict[str, nn.Parameter]]:
        """({name: block}, {name: weight}) of those of `trained` {name: (parameter, its group)} that take whitened steps."""
        found = self._blocks.of(self.kfac.state, {name for name, (_, group) in trained.items() if group["kfac"]})
        return found, {name: weight_part(trained[owner(name)][0], name) for name in found}

    def _step_matrices(self, trained: Mapping[str, Any], weights: Mapping[str, nn.Parameter]) -> None:
        """Step those of `weights` that have operators, and a gradient; `trained` as above."""
        steps = []
        for matrices in self._steps.groups:
            for group in self.param_groups:
                owned = [trained[owner(name)] for name in matrices.names]
                places = [i for i, (p, of_p) in enumerate(owned) if of_p is group and p.grad is not None]
                for place in places:
                    p = owned[place][0]
                    if "momentum_buffer" not in self.state[p]:
                        make_state(self.state[p], p, whitened=True, fused=group["fused"])
                names = [matrices.names[place] for place in places]
                momenta = [view(self.state[trained[owner(name)][0]]["momentum_buffer"], name) for name in names]
                if places:
                    steps.append(MatrixStep(group, matrices, places, [weights[name] for name in names], momenta))
        self._recorded.step(steps, self._steps.made)

    def _step_adamw(self, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> None:
        """AdamW's step of some parameters; those of fewer than two dimensions do not decay."""
        for decay, some in (
            (group["weight_decay"], [p for p in parameters if p.dim() >= 2]),
            (0.0, [p for p in parameters if p.dim() < 2]),
        ):
            if not some:
                continue
            for p in some:
                if "step" not in self.state[p]:
                    make_state(self.state[p], p, whitened=False, fused=group["fused"])
            states = [self.state[p] for p in some]
            adamw(
                [local_part(p) for p in some],
                [gradient_part(p) for p in some],
                [local_part(state["exp_avg"]) for state in states],
                [local_part(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                foreach=not group["fused"],
                fused=group["fused"],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=float(group["lr"]),
                weight_decay=decay,
                eps=group["eps"],
                maximize=False,
            )
