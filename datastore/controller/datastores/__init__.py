"""The controller of Datastores: it makes their claims and volumes, and the places in the storage behind them."""
