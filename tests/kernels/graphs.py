"""Compiled functions that tests look into."""

from collections import Counter

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


class Graphs:
    """What a function is compiled to, by aot_autograd: its graphs and the ops that are in them."""

    def __init__(self, f, **options):
        torch._dynamo.reset()
        self.count, self.ops = 0, Counter()
        self.run = torch.compile(f, backend=self._count, fullgraph=True, **options)

    def _count(self, graph, inputs):
        self.count += 1
        return aot_autograd(fw_compiler=self._note, bw_compiler=self._note)(graph, inputs)

    def _note(self, graph, inputs):
        self.ops.update(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return make_boxed_func(graph.forward)
