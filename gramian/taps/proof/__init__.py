"""The row proof: what the taps attribute to a sample is that sample's gradient.

The taps attribute rows (a_i, g_i) of inputs and output gradients of every call of a layer to sample i, by their place in the
batch. The shapes only suggest that this is right; the proof shows it on the model at hand, or refuses the model by the name of
a layer. Two properties suffice:

    ∂(a_i, g_i)/∂x_j = 0 for i ≠ j          (rows depend on their own sample alone)
    Σ_i tap(a_i, g_i) = ∇_θ Σ_i ⟨c_i, y_i⟩   (the taps' sum is autograd's gradient, for random cotangents c)

For then g_j is linear in the cotangent c_j of its own sample and vanishes with it. With all cotangents but c_i set to zero, the
second line reads tap(a_i, g_i) = ∇_θ ⟨c_i, y_i⟩: what is attributed to sample i is the gradient of its own output. The runs
that show both properties, each one forward and one backward from the same random states, buffers and attributes:

1. Sums. The model runs untapped and tapped: the outputs are equal, and for every parameter the taps' sum is autograd's
   gradient. The untapped run has half the loss, so a backward that is not linear (a hook that normalises) is found.
2. Replacements. Number the B samples at random and write the numbers in ⌈log₂ B⌉ bits. For each bit and each of its two values,
   replace the samples whose bit has that value by others of the batch: 2⌈log₂ B⌉ runs. Two different numbers differ in some
   bit, so for every ordered pair (i, j) there is a run in which i stays while j is replaced. Rows of samples that stay must be
   unchanged, bit for bit where two equal runs are.
3. Order and company. In the reversed batch the rows are reversed, and one unit alone has the gradient that was attributed to
   it in the batch. This finds rows that depend on the place in the batch, and padding to the longest sample that leaks.

Which file shows what:

| file | concept |
|---|---|
| `row_proof` | when a model is proven: on the first batch of every structure of inputs, and on calls no proof has seen |
| `batch_structure` | the structure of a batch, which one proof covers |
| `batch_proof` | one batch: which outputs are proven together, and axes that may be B by chance |
| `prover` | the three parts above, for one set of outputs |
| `row_comparison` | are rows of two runs equal, and sums autograd's, up to rounding |
| `single_unit` | one unit alone against the same unit in the batch |
| `evaluation_mode` | part 3 of models with dropout runs without it |
| `carried_state` | under privacy: no sample may reach a later batch through buffers and attributes |
| `proof_runs`, `row_recorder`, `row_fingerprint` | one run, what it records, and 40 bytes for a row in place of the row |
| `sample_arguments`, `model_outputs`, `output_kinds`, `compiled_arguments` | arguments and outputs by sample |
| `isolated_runs` | runs that leave no trace in the user's model |
"""
