"""Captures the graphs of a compiled call, and prints them the same on every torch version."""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from functorch.compile import (
    aot_module_simplified,
    default_partition,
    min_cut_rematerialization_partition,
)
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import GraphModule, Node

_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int32: "i32",
    torch.int64: "i64",
}
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


@dataclass
class Graphs:
    """A backend for torch.compile that runs the AOT graphs eagerly, and keeps them.

    With ``min_cut`` they are parted as inductor does, which recomputes what it deems cheap.
    """

    min_cut: bool = False
    dynamo: list[GraphModule] = field(default_factory=list)
    forward: list[GraphModule] = field(default_factory=list)
    backward: list[GraphModule] = field(default_factory=list)

    def __call__(self, module: GraphModule, example_inputs: list) -> Callable:
        def keep(graphs: list[GraphModule]) -> Callable:
            def compiler(graph: GraphModule, _: list) -> Callable:
                graphs.append(graph)
                return make_boxed_func(graph.forward)

            return compiler

        self.dynamo.append(module)
        return aot_module_simplified(
            module,
            example_inputs,
            fw_compiler=keep(self.forward),
            bw_compiler=keep(self.backward),
            partition_fn=min_cut_rematerialization_partition if self.min_cut else default_partition,
        )


def capture(function: Callable, *args: Any) -> Graphs:
    """The one Dynamo, AOT forward and AOT backward graph of a call compiled whole."""
    graphs = Graphs()
    outputs = torch.compile(function, backend=graphs, fullgraph=True)(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
    assert [len(graphs.dynamo), len(graphs.forward), len(graphs.backward)] == [1, 1, 1]
    return graphs


def calls(module: GraphModule, target: Any) -> int:
    """How many nodes call this operator."""
    return sum(node.target is target for node in module.graph.nodes)


def render(graphs: Graphs) -> str:
    """The three graphs as text.

    Inputs and gradients carry the names that they have in Python and are listed by name: the order
    in which AOT numbers them depends on the torch version. Aliases are read through.
    """
    (dynamo,), (forward,), (backward,) = graphs.dynamo, graphs.forward, graphs.backward
    names = {node: str(node.target).removeprefix("L_").rstrip("_") for node in _inputs(dynamo)}
    lines = ["dynamo:", *_body(dynamo, names)]
    returned = [names[node] for node in _outputs(dynamo)]
    lines.append(f"    return {', '.join(returned)}")

    arguments = [names[node] for node in _inputs(dynamo)]
    names = dict(zip(_inputs(forward), arguments, strict=True))
    lines += ["forward:", *_body(forward, names)]
    outputs = [names[node] for node in _outputs(forward)]
    returned, saved = outputs[: len(returned)], outputs[len(returned) :]
    lines.append(f"    return {', '.join(returned)}")
    lines.append(f"    save {', '.join(sorted(saved))}")

    upstream = [f"grad_{name}" for name in returned]
    names = dict(zip(_inputs(backward), saved + upstream, strict=True))
    lines += ["backward:", *_body(backward, names)]
    for node, name in sorted(zip(_outputs(backward), arguments, strict=True), key=lambda g: g[1]):
        if node is not None:
            lines.append(f"    grad_{name} = {names[node]}")
    return "\n".join(lines)


def _inputs(module: GraphModule) -> list[Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _outputs(module: GraphModule) -> Any:
    return module.graph.output_node().args[0]


def _body(module: GraphModule, names: dict[Node, str]) -> list[str]:
    """A line for each input and call. Adds the names of the calls to those of the inputs."""
    lines = sorted(f"    {name}: {_form(node)}" for node, name in names.items())
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _ALIASES:
            names[node] = names[node.args[0]]
        elif node.target is getitem and isinstance(node.args[1], int):
            names[node] = _operator(node.args[0])._schema.returns[node.args[1]].name
            lines.append(
                f"    {names[node]}: {_form(node)} = {names[node.args[0]]}[{node.args[1]}]"
            )
        else:
            names[node] = node.name
            arguments = [_text(arg, names) for arg in node.args]
            arguments += [f"{key}={_text(arg, names)}" for key, arg in node.kwargs.items()]
            form = f": {_form(node)}" if _form(node) else ""
            line = f"    {node.name}{form} = {_callee(node)}({', '.join(arguments)})"
            if len(line) > 100:
                line = line.replace("(", "(\n        ", 1)
            lines.append(line)
    return lines


def _operator(node: Node) -> torch._ops.OpOverload:
    target: Any = node.target
    return target.default if isinstance(target, torch._ops.OpOverloadPacket) else target


def _callee(node: Node) -> str:
    target = node.target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    return getattr(target, "__name__", str(target))


def _form(node: Node) -> str:
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{_DTYPES.get(value.dtype, value.dtype)}{list(value.shape)}"


def _text(arg: Any, names: dict[Node, str]) -> str:
    if isinstance(arg, Node):
        return names[arg]
    if isinstance(arg, (tuple, list)):
        return f"({', '.join(_text(item, names) for item in arg)})"
    return str(arg)
