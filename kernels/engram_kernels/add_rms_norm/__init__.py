"""Residual addition fused with the next RMS norm."""
