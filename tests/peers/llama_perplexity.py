"""Run by the peers' Python: perplexity of GGUF files by llama.cpp, over windows of token ids.

    python llama_perplexity.py windows.json A.gguf B.gguf      # one JSON object: file → mean negative log-likelihood
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def mean_loss(path: str, windows: list[list[int]]) -> float:
    """Over all tokens but the first of each window, in float64 from llama.cpp's float32 logits."""
    length = len(windows[0])
    model = llama_cpp.Llama(
        path, n_ctx=length, n_batch=length, n_ubatch=length, logits_all=True, n_threads=1, n_threads_batch=1, verbose=False
    )
    losses = []
    for window in windows:
        model.reset()
        model.eval(window)
        logits = np.array(model.scores[: length - 1], dtype=np.float64)
        logits -= logits.max(1, keepdims=True)
        likely = logits[np.arange(length - 1), window[1:]] - np.log(np.exp(logits).sum(1))
        losses.append(-likely)
    return float(np.concatenate(losses).mean())


windows = json.loads(Path(sys.argv[1]).read_text())
print(json.dumps({path: mean_loss(path, windows) for path in sys.argv[2:]}))
