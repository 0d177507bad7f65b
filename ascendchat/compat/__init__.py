"""Names that other programs import: FlashAttention's functions, AReaL's engine, old paths of ours."""
