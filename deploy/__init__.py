"""Which version serves: gates, promotion, rollback, and the chain of weights behind them."""
