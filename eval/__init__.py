"""Judge a checkpoint or an endpoint: perplexity, KL divergence, agreement."""
