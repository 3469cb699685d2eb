"""Small operators of a layer, each as one."""
