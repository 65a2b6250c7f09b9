"""The controller of Datastores: claims and volumes for pods, and the places in the storage behind them."""
