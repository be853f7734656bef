"""The network as a torch.fx graph, on a copy, for `fold_batchnorm`.

Layers of a promoted network read in the graph what their activations read: nothing has to be found
out when it runs.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from threshold_gating.conversion import sites, watch
from threshold_gating.conversion.answering import LEAVE, site_of_call
from threshold_gating.conversion.gate import PerCall
from threshold_gating.conversion.intercept import intercept_calls, release
from threshold_gating.conversion.site import Site
from threshold_gating.training.following import Remember, Take, does, forget, keep_input

Module = TypeVar("Module", bound=nn.Module)
# What runs around a module's `forward` is kept under these names.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Of `operator`, which torch.fx records for what is written x[k] and x * y.
_WRITTEN = {operator.getitem: Tensor.__getitem__, operator.mul: Tensor.mul}
# Functions of `operator` that overwrite their first argument.
_OVER = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")


class _Proxy(fx.Proxy):
    """Keeps x += y, of which torch.fx makes x = x + y: others may read what is overwritten."""


def _overwriting(name: str) -> Any:
    target = getattr(operator, name)
    return lambda self, other: self.tracer.create_proxy("call_function", target, (self, other), {})


for _name in _OVER:
    setattr(_Proxy, f"__{_name}__", _overwriting(_name))


class Tracer(fx.Tracer):
    """Follows a network down to torch's own modules and ours."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, qualified_name: str) -> bool:
        ours = type(m).__module__.startswith("threshold_gating.")
        return ours or super().is_leaf_module(m, qualified_name)


class Network(NamedTuple):
    """A copy of a network as a graph, and what answers its calls."""

    module: fx.GraphModule
    calls: dict[fx.Node, Site | None]
    as_they_come: bool  # converted without inputs: gates answer whatever is called


def trace(model: nn.Module) -> Network:
    """`model` as a graph; it may be plain or converted, and is left as it was."""
    if is_hooked(model):
        raise ValueError(
            f"{type(model).__name__} has hooks, and torch.fx follows what is inside of them alone; "
            "remove them, and register them on the result."
        )
    copied, tracer = watch.copied(model), Tracer()
    plans: dict[str, Any] = {}  # of the owners that are followed
    closed: tuple[str, ...] = ()  # what is not followed keeps the gates that answer its calls
    for name, part in copied.named_modules():
        if name.startswith(closed):
            continue
        if name and tracer.is_leaf_module(part, name):
            closed += (f"{name}.",)
            continue
        vars(part).pop("tg_follow", None)
        if "tg_sites" in vars(part):
            plans[name] = vars(part)["tg_sites"]
        release(part)
    try:
        graph = tracer.trace(copied)
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot follow {type(model).__name__} ({type(error).__name__}: {error}); "
            "give the parts that it can follow, for example model.features, one by one."
        ) from error
    module = fx.GraphModule(copied, graph, type(model).__name__)
    for name, part in module.named_modules():  # torch makes new containers, in training mode
        part.training = copied.get_submodule(name).training
    _separate(module)
    calls = _calls(module, plans)
    come = None in plans.values() and None not in calls.values()
    network = Network(module, calls, come)
    _connect(network)
    return network


def _separate(module: fx.GraphModule) -> None:
    """Call each instance of a `PerCall` by itself: in a graph it is known which call is which."""
    counts = Counter[str]()
    for node in module.graph.nodes:
        part = module.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(part, PerCall):
            counts[node.target] += 1
            node.target = f"{node.target}.{counts[node.target] - 1}"
    for name in counts:
        part = module.get_submodule(name)
        assert isinstance(part, PerCall)
        module.set_submodule(name, nn.ModuleList(part.calls))


def _calls(module: fx.GraphModule, plans: dict[str, Any]) -> dict[fx.Node, Site | None]:
    """The nonlinear calls of the graph, and the sites that answer them in the converted network."""
    runs: dict[tuple[str, str], dict[str, fx.Node]] = {}  # of an owner's forward
    for node in module.graph.nodes:
        if (kind := _kind(node)) is not None:
            inside = node.meta.get("nn_module_stack") or {}
            stack = [("", ""), *((k, str(v[0])) for k, v in inside.items())]
            # the innermost owner around a call answers it
            run = runs.setdefault(next((k for k in stack[::-1] if k[1] in plans), ("", "")), {})
            count = sum(name.partition("#")[0] == kind for name in run)
            run[f"{kind}#{count}"] = node
    for owner, plan in plans.items():  # which lost all its calls on the way
        if plan and LEAVE not in plan and not any(owner == name for _, name in runs):
            runs["", owner] = {}
    found: dict[fx.Node, Site | None] = {}
    for (_, owner), run in runs.items():
        plan = plans.get(owner, {LEAVE: None})
        if plan is None:
            plan = {n: site_of_call(n.partition("#")[0], c.args, c.kwargs) for n, c in run.items()}
        elif LEAVE in plan:
            plan = dict.fromkeys(run)
        if plan.keys() != run.keys():
            raise ValueError(
                f"{owner or 'the network'} makes {', '.join(run) or 'no call'} in torch.fx, "
                f"and made {', '.join(plan) or 'no call'} when it was converted; give the network "
                "as it was before, or convert it with inputs that take the same path."
            )
        found |= {node: plan[name] for name, node in run.items()}
    return found


def _kind(node: fx.Node) -> str | None:
    """The kind of nonlinearity that a node calls, as far as it can be told without its values."""
    if node.op not in ("call_function", "call_method"):
        return None
    kind = sites.FUNCTIONS.get(function(node), (None, False))[0]
    if kind in ("maximum", "minimum") and len(node.all_input_nodes) < 2:
        return None  # a reduction
    if kind == "rrelu" and sites.KINDS[kind].read(*node.args, **node.kwargs).parameters[-1]:
        return None
    by_tensors = kind in ("clamp", "clamp_min", "clamp_max") and len(node.all_input_nodes) > 1
    return f"{kind}_by_tensors" if by_tensors else kind


def finished(network: Network) -> fx.GraphModule:
    """The module of a graph that was changed, with its calls answered by the gates of before."""
    module, plan = network.module, dict[str, Site | None]()
    module.graph.lint()
    module.recompile()
    module.delete_all_unused_submodules()
    for node in module.graph.nodes:
        if (kind := _kind(node)) is not None:
            count = sum(name.partition("#")[0] == kind for name in plan)
            site = network.calls.get(node)
            # lines are those of the generated text now, and a graph takes one path
            plan[f"{kind}#{count}"] = site and replace(site, line="")
    if network.as_they_come:
        intercept_calls(module, None)
    elif any(site is not None for site in plan.values()):
        intercept_calls(module, plan)
    return module


def put(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """`model` with `new` wherever `old` was, under each of its names; `new` if it is the root."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
    return new if model is old else model


def hooked_as(new: Module, old: nn.Module) -> Module:
    """`new` with whatever runs around the forward of `old`."""
    vars(new).update({k: v for k, v in vars(old).items() if "_hook" in k})
    return new


def is_hooked(part: nn.Module) -> bool:
    """Whether something of the user's runs around a module's `forward`."""
    hooks = [hook for name in _HOOKS for hook in vars(part)[name].values()]
    return any(
        not getattr(hook, "__module__", "").startswith("threshold_gating.") for hook in hooks
    )


def reads_parameters(network: Network, node: fx.Node) -> bool:
    """Whether the network uses parameters of the module that `node` calls by themselves."""
    own = f"{node.target}."
    nodes = network.module.graph.nodes
    return any(n.op == "get_attr" and str(n.target).startswith(own) for n in nodes)


def views(network: Network, node: fx.Node) -> list[fx.Node]:
    """`node` and whatever may lie in the same memory: what it was made from, what is made of it."""
    found = [node]
    for here in found:
        made = [u for u in here.users if _is_view(network, u)]
        base = here.all_input_nodes if _is_view(network, here) else []
        found += [n for n in (*made, *base) if n not in found]
    return found


def _is_view(network: Network, node: fx.Node) -> bool:
    is_copy = node.op != "call_module" and does(function(node)) == "copy"
    return (is_move(network, node) and not is_copy) or overwrites(network, node)


def overwrites(network: Network, node: fx.Node) -> bool:
    """Whether a call writes into one of its inputs."""
    if node.op == "call_module":
        return any(getattr(m, "inplace", False) for m in part_of(network, node).modules())
    if node.op not in ("call_function", "call_method"):
        return False
    over = sites.FUNCTIONS.get(function(node), ("", False))
    name = getattr(node.target, "__name__", str(node.target))
    asked = over[0] in sites.KINDS and sites.KINDS[over[0]].read(*node.args, **node.kwargs).inplace
    return (
        bool(asked or over[1] or name in _OVER)
        or (name.endswith("_") and not name.endswith("__"))
        or bool(node.kwargs.get("inplace"))
        or node.kwargs.get("out") is not None
    )


def expect_axes(layer: nn.Module, axes: int) -> None:
    """Let a layer refuse inputs with another number of axes: their channels are elsewhere."""
    layer.register_forward_pre_hook(functools.partial(_check_axes, axes))


def _check_axes(axes: int, layer: nn.Module, args: Any) -> None:
    if args[0].dim() != axes:
        raise ValueError(
            f"{type(layer).__name__}: what was folded into its gates belongs to axis 1 of inputs "
            f"with {axes} axes; got the shape {tuple(args[0].shape)}. Use the network as it was."
        )


def function(node: fx.Node) -> Any:
    """The function that a node calls, also where it is a method of a tensor."""
    target: Any = node.target
    if isinstance(target, str):
        return getattr(Tensor, target, None) if node.op == "call_method" else None
    return _WRITTEN.get(target, target)


def part_of(network: Network, node: fx.Node) -> Any:
    """The module that a node calls."""
    return network.module.get_submodule(str(node.target))


def is_move(network: Network, node: fx.Node) -> bool:
    """Whether a call only moves elements around."""
    if node.op == "call_module":
        part = part_of(network, node)
        idle = isinstance(part, nn.Dropout) and not (part.p and part.training)
        return idle or isinstance(part, nn.Flatten | nn.Identity)
    return does(function(node)) in ("move", "copy")


def _connect(network: Network) -> None:
    """Let promoted layers read what their activations read, and forget how they found it."""
    module, graph = network.module, network.module.graph
    promoted = [n for n in graph.nodes if n.op == "call_module" and _take(part_of(network, n))]
    if not promoted:
        return
    acts = {node for node in graph.nodes if _is_act(network, node)}
    open_acts = acts - _keep_inputs(network, acts)
    for node in promoted:
        read = _read(network, node.all_input_nodes[0], open_acts)
        if read is None:
            raise ValueError(
                f"torch.fx does not show where {node.target} gets its input from; fold the network "
                "before it is promoted."
            )
        act, given = read
        node.args, node.kwargs = given, {}
        if len(given) == 1:  # where the activation was: what it read may be overwritten later
            act.prepend(node)
    for part in module.modules():
        for hooks in (vars(part)["_forward_pre_hooks"], vars(part)["_forward_hooks"]):
            for key in [k for k, hook in hooks.items() if _is_following(hook)]:
                del hooks[key]
    for node in reversed(graph.nodes):  # what nothing reads any more
        idle = node in acts or is_move(network, node) or _is_product(node)
        if idle and not node.users and not overwrites(network, node):
            graph.erase_node(node)


def _is_act(network: Network, node: fx.Node) -> bool:
    """Whether a node is an activation that a promoted layer may have taken in."""
    if node.op == "call_module":
        hooks = part_of(network, node)._forward_hooks.values()
        return any(isinstance(hook, Remember) for hook in hooks)
    return _kind(node) in sites.KINDS and bool(node.args)


def _read(
    network: Network, node: fx.Node, acts: set[fx.Node]
) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """The activation behind a node, and what a promoted layer reads: its input, and the factor
    by which it is multiplied if there is one, both moved as the activation was."""
    graph = network.module.graph
    if node in acts:
        return node, (node.all_input_nodes[0],)
    if is_move(network, node) and node.args and isinstance(node.args[0], fx.Node):
        if (read := _read(network, node.args[0], acts)) is None:
            return None
        with graph.inserting_before(read[0] if len(read[1]) == 1 else node):
            moved = [graph.node_copy(node, _substitute(node.args[0], each)) for each in read[1]]
        return read[0], tuple(moved)
    for k in (0, 1) if _is_product(node) else ():
        read = _read(network, node.all_input_nodes[k], acts)
        if read is not None and len(read[1]) == 1:
            return read[0], (*read[1], node.all_input_nodes[1 - k])
    return None


def _is_product(node: fx.Node) -> bool:
    return does(function(node)) == "product" and len(node.all_input_nodes) == 2


def _take(part: nn.Module) -> bool:
    return any(isinstance(hook, Take) for hook in part._forward_pre_hooks.values())


def _is_following(hook: Any) -> bool:
    return hook in (keep_input, forget) or isinstance(hook, Take | Remember)


def _substitute(old: Any, new: Any) -> Any:
    return lambda n: new if n is old else n


def _keep_inputs(network: Network, acts: set[fx.Node]) -> set[fx.Node]:
    """Let no activation overwrite its input, which promoted layers read from now on.

    What reads the input later, and so saw it overwritten, reads the result instead. Activations
    of whose input there are other views, which would not see that, stay as they are: returned.
    """
    place = {n: k for k, n in enumerate(network.module.graph.nodes)}
    over = [n for n in place if n in acts and overwrites(network, n)]
    for node in over:
        read = node.all_input_nodes[0]
        for user in [u for u in read.users if place[u] > place[node]]:
            user.replace_input_with(read, node)
    fixed: set[Any] = set()  # by their targets: a module overwrites in all of its calls or in none
    for node in over:
        others = [n for n in views(network, node.all_input_nodes[0]) if place[n] < place[node]]
        if any(place[u] > place[node] for n in others for u in n.users):
            fixed.add(node.target)
    for node in over:
        if node.target not in fixed:
            _not_in_place(network, node)
    return {node for node in over if node.target in fixed}


def _not_in_place(network: Network, node: fx.Node) -> None:
    if node.op == "call_module":
        for module in part_of(network, node).modules():
            if getattr(module, "inplace", False):
                module.inplace = False
        return
    name = str(getattr(node.target, "__name__", node.target))
    if not name.endswith("_"):  # by an argument
        kind = sites.FUNCTIONS[function(node)][0]
        parameters = sites.KINDS[kind].read(*node.args, **node.kwargs).parameters
        node.args, node.kwargs = (node.all_input_nodes[0], *parameters), {}
    elif node.op == "call_method":
        node.target = name.removesuffix("_")
    else:
        plain = name.removesuffix("_")
        node.target = getattr(F, plain, None) or getattr(torch, plain)
