"""The commands, one noun a file; each file's `register(app)` adds its own. Heavy imports happen inside a command, not here."""

from gemq.commands import card, doctor, evaluate, push, quantize, recipes, serve, verify

COMMANDS = (quantize.register, evaluate.register, verify.register, card.register, serve.register, push.register, recipes.register, doctor.register)
