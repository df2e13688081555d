"""Small models with the real structure of every architecture that gemq knows, made on the spot with seeded weights.

`gemma3`, `gemma4`: one builder an architecture, each also a command (`python -m tests.models.gemma4 KIND OUT`).
`real_configs`: the real models' dimensions, for whatever works from a config alone.
`gemma4-tiny/`: a small Gemma 4 that was trained (`train_gemma4`), so that its perplexity means something.
"""
