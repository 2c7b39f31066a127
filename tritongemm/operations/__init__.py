"""Operations: what the operands of a call mean, for serving and for capturing alike."""
