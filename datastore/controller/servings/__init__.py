"""The controller of Servings: a version of a model behind one address. It reads no storage and no Secret."""
