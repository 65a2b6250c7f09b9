"""Object stores: one Protocol (base), its adapters and wrappers."""
