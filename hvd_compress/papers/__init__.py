"""Methods of other papers, as baselines and plug-ins, with the parts that only they use."""
