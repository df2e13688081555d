"""The commands, one noun a file; each file's `register(app)` adds its own. Heavy imports happen inside a command, not here."""

from gemq.commands import (
    accuracy,
    bench,
    card,
    doctor,
    evaluate,
    package,
    pareto,
    push,
    quantize,
    recipes,
    rehearse,
    report,
    serve,
    sign,
    tune,
    verify,
)

COMMANDS = (
    quantize.register, pareto.register, evaluate.register, verify.register, card.register, sign.register, package.register, serve.register,
    tune.register, bench.register, accuracy.register, rehearse.register, report.register, push.register, recipes.register, doctor.register,
)  # fmt: skip
