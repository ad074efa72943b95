"""ContiguousCache: the plainest cache that there can be, against which the one in pages is held.

One text, numbers as they are, everything in two tensors that grow. It shares no code with `quantkit.runtime`.
"""

import torch

from quantkit.models.attention import attend


class ContiguousCache:
    def __init__(self):
        self.layers = {}
        self.length = 0

    def begin(self, count):
        positions = torch.arange(self.length, self.length + count)[None]
        self.count = count
        return positions, torch.full_like(positions, self.length + count)

    def attend(self, layer, q, k, v, *, scale, window, cap):
        if layer in self.layers:
            before = self.layers[layer]
            k, v = torch.cat([before[0], k], dim=2), torch.cat([before[1], v], dim=2)
        self.layers[layer] = (k, v)
        return attend(q, k, v, scale=scale, window=window, cap=cap)

    def advance(self):
        self.length += self.count


def greedy(model, ids, count, cache=None):
    """`count` tokens after `ids`, one at a time, each the likeliest."""
    cache = cache or ContiguousCache()
    answer, inputs = [], list(ids)
    with torch.inference_mode():
        for _ in range(count):
            answer.append(int(model.forward(torch.tensor([inputs]), cache=cache, last_only=True)[0, -1].argmax()))
            inputs = answer[-1:]
    return answer
