"""`gemq recipes ls|show|validate`."""

from __future__ import annotations

from typing import Annotated

import typer

from gemq import output

recipes_app = typer.Typer(no_args_is_help=True, help="The recipes that come with gemq, and checks of your own.")
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


@recipes_app.command("ls")
def list_recipes(json_output: Json = False) -> None:
    """List the built-in recipes with what each trades."""
    from gemq.recipes.model import built_in_names, load_recipe

    output.mode.json = json_output
    found = [load_recipe(name) for name in built_in_names()]
    output.table("", ("recipe", "what it trades"), [(recipe.name, recipe.summary) for recipe in found])
    output.result({"recipes": [{"name": recipe.name, "summary": recipe.summary} for recipe in found]}, "")


@recipes_app.command()
def show(recipe: Annotated[str, typer.Argument(help="A recipe's name or file.")], json_output: Json = False) -> None:
    """Print a recipe as YAML, every default written out: a start for one of your own."""
    from gemq.recipes.model import load_recipe

    output.mode.json = json_output
    found = load_recipe(recipe)
    output.result(found.model_dump(mode="json"), found.to_yaml().rstrip())


@recipes_app.command()
def validate(recipe: Annotated[str, typer.Argument(help="A recipe's name or file.")], json_output: Json = False) -> None:
    """Check a recipe: exit 0 if it is well-formed, 2 with the key and the valid values if not."""
    from gemq.recipes.model import load_recipe

    output.mode.json = json_output
    found = load_recipe(recipe)
    output.result({"recipe": found.name, "valid": True}, f"{found.name} is a valid recipe: {len(found.rules)} rules")


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.add_typer(recipes_app, name="recipes")
