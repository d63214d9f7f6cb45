"""The product's scheduler and operators in virtual time: the papers' figures, and how large a cluster should be."""
