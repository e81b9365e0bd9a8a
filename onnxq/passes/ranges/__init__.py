"""Ranges of activations, chosen by the error behind them."""
