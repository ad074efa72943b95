"""Budget: how much of the work is held in memory at once. The result is the same whatever it is."""

from dataclasses import dataclass

from quantkit.calibration.gradients import BATCH_TOKENS, LOGITS_AT_ONCE
from quantkit.commands.block_hessians import HESSIAN_BYTES

WALK_TOKENS = 2048
SPILL_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Budget:
    """
    walk_tokens      calibration tokens that go through a block together, in whole rows
    backward_tokens  the same where gradients are found
    logits_at_once   numbers of the logits that gradients begin with
    hessian_bytes    of Hessians that are gathered in one pass over the text
    spill_bytes      states of a backward pass beyond this live in files of the job
    apart            linears that read one input are solved one by one, not side by side
    """

    walk_tokens: int = WALK_TOKENS
    backward_tokens: int = BATCH_TOKENS
    logits_at_once: int = LOGITS_AT_ONCE
    hessian_bytes: int = HESSIAN_BYTES
    spill_bytes: int = SPILL_BYTES
    apart: bool = False


DEFAULT = Budget()
