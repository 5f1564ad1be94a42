"""The bundled tiny policy and the recipe that made it."""
