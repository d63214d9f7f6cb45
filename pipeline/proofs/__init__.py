"""What a run's topics must say if nothing was lost and nothing repeated: facts, and pure checks over them."""
