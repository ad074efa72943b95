"""Budget: how much of the work is held in memory at once. The result is the same whatever it is, but for the experts
of a mixture that a batch gives few tokens: see `FEW_TOKENS`."""

from dataclasses import dataclass

from quantkit.calibration.gradients import BATCH_TOKENS, LOGITS_AT_ONCE
from quantkit.commands.quantization.hessians import HESSIAN_BYTES

WALK_TOKENS = 2048
SPILL_BYTES = 256 << 20
# Libraries of matrix products sum few rows in another order than many; 32 to 2048 at once were seen to come out alike.
FEW_TOKENS = (
    "in smaller batches an expert may get fewer than 32 tokens of a batch at a time, whose products are rounded "
    "otherwise: the last bits may differ from those of a run with more memory"
)
FEW_PREDICTIONS = (
    "gradients begin with fewer predictions at a time, whose products some processors round otherwise (those without "
    "AVX-512, seen): the result may differ in a few bits from that of a run with more memory"
)


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
