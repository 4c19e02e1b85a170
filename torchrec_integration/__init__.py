"""TorchRec's FUSED_TRITON compute kernel on top of fbtriton. Not written yet: `install` says so.

Nothing is patched on import; patching happens in `install` only, and `uninstall` will undo it.
"""

from __future__ import annotations


def install() -> None:
    """Make TorchRec's FUSED_TRITON compute kernel work.

    Raises:
        NotImplementedError: always, in this version.
    """
    raise NotImplementedError(
        "torchrec_integration.install is not implemented yet; use fbtriton.TableBatchedEmbeddingBags directly"
    )
