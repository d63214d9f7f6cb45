"""Training backends behind one small interface: DeepSpeed (ZeRO 0 to 3) and plain torch."""
