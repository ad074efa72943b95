"""A real model: the perplexity that transformers gives for the same windows, and published figures for WikiText-2.

WikiText-2 is not part of this repository. Set QUANTKIT_WIKITEXT2 to the test split (`test.parquet`, column `text`) to
check the figures, which were measured with transformers in float32.
"""

import os
from pathlib import Path

import pytest
import smollm2
import torch

from quantkit.calibration.text import held_back_text
from quantkit.commands.evaluate import perplexity
from quantkit.evaluators.perplexity import cut_windows, score
from quantkit.progress import Silent
from quantkit.runtime.load import load
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import PerplexitySettings, TextSettings

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def folder():
    return smollm2.for_test()


def test_windows_score_as_with_transformers(folder):
    from transformers import AutoModelForCausalLM

    windows = cut_windows(Tokenizer.open(folder).encode(held_back_text()), 512, 4, context=8192)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = [float(peer(window[None], labels=window[None]).loss) for window in windows]
    assert score(load(folder), windows).window_nll == pytest.approx(expected, abs=1e-4)


@pytest.mark.skipif("QUANTKIT_WIKITEXT2" not in os.environ, reason="QUANTKIT_WIKITEXT2 does not name a test.parquet")
@pytest.mark.parametrize(("length", "windows", "expected"), [(2048, 10, 19.9232), (512, 40, 29.1896)])
def test_published_figures_of_wikitext2(length, windows, expected, folder):
    text = TextSettings(text=Path(os.environ["QUANTKIT_WIKITEXT2"]), length=length, windows=windows)
    report = perplexity(PerplexitySettings(str(folder), text), Silent())
    assert report.scored.text_tokens == 304_978
    assert report.score.perplexity == pytest.approx(expected, abs=0.01)
