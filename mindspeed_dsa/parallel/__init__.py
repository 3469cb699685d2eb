"""Communication that runs beside computation: handles, gathers, exchanges and weight gradients that wait."""
