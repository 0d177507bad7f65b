// Cells of recurrent networks. Gates lie in torch's order: input, forget, candidate, output.
#include "checks.h"

OP(ThnnFusedLstmCell,
   (In inputGates, In hiddenGates, In cx, OptIn inputBias, OptIn hiddenBias, Out hy, Out cy, Out storage),
   (dtype(inputGates, kFloating), same_shape(inputGates, hiddenGates), same_shape(storage, inputGates)),
   at::Tensor gates = wide(inputGates) + wide(hiddenGates);
   if (inputBias.given()) gates = gates + wide(inputBias);
   if (hiddenBias.given()) gates = gates + wide(hiddenBias);
   auto part = gates.chunk(4, 1);
   at::Tensor i = part[0].sigmoid(), f = part[1].sigmoid(), g = part[2].tanh(), o = part[3].sigmoid();
   at::Tensor c = f * wide(cx) + i * g;
   hy = o * c.tanh();
   cy = c;
   storage = at::cat({i, f, g, o}, 1))
OP(ThnnFusedLstmCellBackward,
   (OptIn gradHy, OptIn gradC, In cx, In cy, In storage, bool hasBias, Out gradGates, Out gradCx, OptOut gradBias),
   (dtype(cx, kFloating), same_shape(cx, cy), same_shape(gradGates, storage)),
   auto part = wide(storage).chunk(4, 1);
   at::Tensor i = part[0], f = part[1], g = part[2], o = part[3];
   at::Tensor dh = gradHy.defined() ? wide(gradHy) : at::zeros_like(i);
   at::Tensor tanh_c = wide(cy).tanh();
   at::Tensor dc = dh * o * (1 - tanh_c.square());
   if (gradC.defined()) dc = dc + wide(gradC);
   at::Tensor gates = at::cat({dc * g * i * (1 - i), dc * wide(cx) * f * (1 - f), dc * i * (1 - g.square()),
                               dh * tanh_c * o * (1 - o)}, 1);
   gradGates = gates;
   gradCx = dc * f;
   if (hasBias) gradBias = gates.sum(0))
