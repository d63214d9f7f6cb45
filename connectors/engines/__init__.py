"""Generation engines behind one Protocol: tokens and log-probs out, abort with the partial, weights in."""
