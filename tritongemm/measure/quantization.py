"""The time in which activations are quantised, as the products that read them are timed."""

from __future__ import annotations

from functools import partial
from math import ceil

from tritongemm.core.launch import Launch
from tritongemm.measure.operand_sets import LeadInKernel, OperandSets, side_by_side
from tritongemm.runtime.launch_preparation import prepare_launch, tensor_map_makers

_GRAPH_SECONDS = 4e-4
_ROUNDS = 20
_FROM_BYTES = 2  # of an element of the activations, which are bf16


def time_quantization(operands: OperandSets, launch: Launch) -> list[float]:
    """Seconds of one launch, a sample for each replay of a graph, before which memory on the whole device is read.

    Args:
        operands: of the problem whose A is written; theirs are the device, the stream, the protocol and the clock.
        launch: of the kernel, on addresses named x, q and scale.
    """
    import torch

    problem, device = operands.problem, operands.device
    place = operands.sets[0]["a"].device
    x = torch.randn((problem.m, problem.k), device=place).to(torch.bfloat16)
    q, scale = operands.sets[0]["a"], operands.sets[0]["scale_a"]
    each = x.numel() * (_FROM_BYTES + q.element_size()) + scale.numel() * scale.element_size()
    rotated = ceil(operands.rotation_bytes / each) + 1
    copies = max(1, min(rotated, OperandSets.MAX_COPIES, device.memory()[0] // (4 * each)))
    sets = side_by_side({"x": x, "q": q, "scale": scale}, copies)
    module = device.load(launch.read_code())
    try:
        function, makers = module.function(launch.symbol), tensor_map_makers(device, launch)
        starts = [
            prepare_launch(function, launch, makers, {name: t.data_ptr() for name, t in one.items()}).launch
            for one in sets
        ]
        launches = max(copies, min(OperandSets.MAX_COPIES, int(_GRAPH_SECONDS / operands.traffic_seconds(each))))
        graph = operands.capture([partial(starts[i % copies], operands.stream) for i in range(launches)])
        try:
            lead_in = LeadInKernel(place)
            samples = []
            for _ in range(_ROUNDS + 2):
                lead_in()
                samples.append(operands.race_clock.time(graph, launches, launch.symbol))
        finally:
            graph.destroy()
    finally:
        module.unload()
    return samples[2:]
