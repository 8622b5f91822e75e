"""The strategy `zero1`: the optimizer's state is sharded over the ranks."""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ..generators import RngScope
from ..parallel.exchange import gather_trees
from ..parallel.world import World
from .base import BuildOptimizer, Parameters, is_ours, load_optimizer, nbytes, trainable
from .buckets import Flat


class Zero1(Flat):
    """The strategy with a sharded optimizer state: each rank keeps and updates its own part of the parameters.

    Only the owner of a part gets the sum of its gradients, while the backward pass still runs. The owner updates its parameters and sends
    them to the others. A ring moves as many bytes for this as for one all-reduce. The checkpoint holds the full state in the layout of
    the plain optimizer, so it loads at any world size.

    After S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), stage 1.
    """

    capturable = False
    shards_gradients = True
    one_model = one_optimizer = True
    owners: dict[nn.Parameter, int]

    def wrap(self, model: nn.Module, world: World, example: torch.Tensor | None) -> nn.Module:
        # Also of what is frozen: it may train later.
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self.owners = _assign_owners(trainable(model), world.size) | _assign_owners(frozen, world.size)
        return super().wrap(model, world, example)

    def groups(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        if any(parameter not in self.owners for parameter in params):
            raise self.refuse(
                "gives each parameter to a rank when the model is wrapped, and the model has a new one",
                "add and replace layers before replicate(), or use sync.name=flat",
            )
        self._owned: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
        for parameter in params:
            self._owned.setdefault((self.owners[parameter], parameter.dtype), []).append(parameter)
        return list(self._owned.values())

    def synchronize(self) -> None:
        super().synchronize()
        for parameter, owner in self.owners.items():
            if owner != self.world.rank:
                parameter.grad = None  # a partial sum, which only its owner has completed

    def gradients(self, parameters: Parameters | None = None) -> list[torch.Tensor]:
        if parameters is not None:
            return super().gradients(parameters)
        return [flat for flat, (owner, _) in zip(self._flats, self._owned) if owner == self.world.rank]

    def make_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer(build)
        kind = type(optimizer)
        if combines(optimizer):
            raise self.refuse(
                f"needs an optimizer that treats each parameter by itself, and {kind.__name__} combines them",
                "use another optimizer, or sync.name=flat",
            )
        if further := optimizer.state_dict().keys() - {"state", "param_groups"}:
            raise self.refuse(
                f"saves what an optimizer has of each parameter and group, and {kind.__name__} saves {', '.join(sorted(further))} besides",
                "keep it in the groups, or use sync.name=flat",
            )
        if not all(is_ours(hook) for hook in optimizer._optimizer_step_pre_hooks.values()):
            self._refuse_hook()
        self.regroup(optimizer, [{**group} for group in optimizer.param_groups])
        optimizer.register_step_post_hook(lambda *_: self._broadcast_parameters())
        optimizer.register_step_pre_hook = self._refuse_hook  # type: ignore[assignment,method-assign]
        optimizer.add_param_group = self._refuse_group  # type: ignore[assignment,method-assign]
        return optimizer

    def _refuse_hook(self, *_: Any) -> NoReturn:
        raise self.refuse(
            "sums each gradient on one rank only, and a hook before the optimizer's step would see that rank's alone",
            "clip by run.step(…, clip=…), or use sync.name=flat",
        )

    def _refuse_group(self, _: Any) -> NoReturn:
        raise self.refuse(
            "shares the optimizer's parameters among the ranks when it is made, and cannot take a further group",
            "give run.optimizer() all groups, also of what is frozen, or use sync.name=flat",
        )

    @torch.no_grad()
    def _broadcast_parameters(self) -> None:
        """Sends every owner's parameters to the other ranks. Collective."""
        if self.world.size == 1:
            return
        broadcasts = []
        for (owner, _), params in self._owned.items():
            flat = torch.cat([p.detach().reshape(-1) for p in params])
            broadcasts.append((dist.broadcast(flat, owner, async_op=True), flat, owner, params))
            self.bytes_sent += nbytes(flat)
        for work, flat, owner, params in broadcasts:
            if work is not None:
                work.wait()
            if owner != self.world.rank:
                for parameter, piece in zip(params, flat.split([p.numel() for p in params])):
                    parameter.copy_(piece.view(parameter.shape))

    def parameter_groups(self, optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:  # noqa: ARG002
        return self._param_groups

    def regroup(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        # The parameters of all ranks; the optimizer keeps this rank's.
        self._param_groups = [list(group["params"]) for group in groups]
        owned = [[p for p in params if self.owners.get(p) == self.world.rank] for params in self._param_groups]
        super().regroup(optimizer, [{**group, "params": params} for group, params in zip(groups, owned)])
        mine = set(itertools.chain.from_iterable(owned))
        for parameter in itertools.chain.from_iterable(self._param_groups):
            if parameter not in mine:
                optimizer.state.pop(parameter, None)  # some optimizers make it when they are made

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        # As the plain optimizer's `state_dict` numbers them.
        number = {parameter: n for n, parameter in enumerate(itertools.chain.from_iterable(self._param_groups))}
        own_state = {number[p]: state for p, state in optimizer.state.items()}
        parts = gather_trees(own_state, self.world)
        if parts is None:
            return None
        groups = zip(optimizer.state_dict()["param_groups"], self._param_groups)
        full = [{**group, "params": [number[p] for p in params]} for group, params in groups]
        state = {n: entry for part in parts for n, entry in part.items()}
        return {"state": dict(sorted(state.items())), "param_groups": full}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        groups = []
        for group, params in zip(state["param_groups"], self._param_groups):
            own_numbers = [n for n, p in zip(group["params"], params) if self.owners.get(p) == self.world.rank]
            groups.append({**group, "params": own_numbers})
        kept = {n for group in groups for n in group["params"]}
        entries = {n: entry for n, entry in state["state"].items() if n in kept}
        load_optimizer(optimizer, {"state": entries, "param_groups": groups})


def _assign_owners(params: list[nn.Parameter], size: int) -> dict[nn.Parameter, int]:
    """Returns parameter → owner. Each rank owns a contiguous stretch, so that the first stretch is complete early in backward."""
    total, before, owner = max(sum(p.numel() for p in params), 1), 0, {}
    for parameter in params:
        owner[parameter] = min((2 * before + parameter.numel()) * size // (2 * total), size - 1)
        before += parameter.numel()
    return owner


def combines(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a parameter's step depends on other parameters, for example by the norm of all gradients.

    The function steps two small parameters together, and one of them alone. It trusts an optimizer that cannot be made by its defaults.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return True
    like = next((p for group in optimizer.param_groups for p in group["params"]), torch.zeros(()))
    with RngScope(like.device, every=True) as drawing:
        try:
            return not torch.equal(*(_stepped(optimizer, like, count, drawing) for count in (1, 2)))
        except Exception:  # noqa: BLE001 - a user's constructor may raise anything
            return False


def _stepped(optimizer: torch.optim.Optimizer, like: torch.Tensor, count: int, drawing: RngScope) -> torch.Tensor:
    """Returns the first of `count` small parameters after a few steps of such an optimizer; the others have large gradients."""
    params = [nn.Parameter(like.new_ones(4, 4) * (number + 1)) for number in range(count)]
    probe = type(optimizer)(params, **optimizer.defaults)
    for step in range(1, 4):
        drawing.seed(step)  # a step may draw noise
        for number, parameter in enumerate(params):
            parameter.grad = parameter.detach() * 0.1 * step * 100**number
        probe.step()
    return params[0].detach()
