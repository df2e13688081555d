"""The launch.sh / serve.py pair, and what starts, packages and checks it."""
