"""Policy losses: pure functions of (new, prox, behave, ref) log-probs, one a file, loaded by entry point."""
