//! Tensors of any device in the memory of the host.

use burn::{
    module::{Module, Param},
    tensor::{DType, Device, Tensor, TensorData, Transaction},
};
use drumline::ddp::{Place, Values};

use crate::{
    Error, Result,
    burn_version::backend::{Dispatch, FlexTensor},
    failure,
    pack::{device_name, is_flex, pack_flex, slice},
    tap::{GradientTap, Stored},
    tensors::{VisitFloat, visit_floats},
};

/// A tensor that the CPU can read.
pub(crate) enum Readable {
    Flex(FlexTensor),
    Data(TensorData),
}

impl Readable {
    pub(crate) fn dtype(&self) -> DType {
        match self {
            Readable::Flex(tensor) => tensor.dtype(),
            Readable::Data(data) => data.dtype(),
        }
    }

    /// Writes the tensor to `place`, or adds it, row-major. Returns whether type and length fit.
    pub(crate) fn pack(&self, place: Place<'_>) -> bool {
        match self {
            Readable::Flex(tensor) => pack_flex(tensor, place),
            Readable::Data(data) => values(data).is_some_and(|values| place.put(values)),
        }
    }

    /// Calls `with` with the elements, row-major. `None` if their type is none that gradients have.
    pub(crate) fn with_values<R>(self, with: impl FnOnce(Values<'_>) -> R) -> Option<R> {
        let data = match self {
            Readable::Flex(tensor) => match slice(&tensor) {
                Some(values) => return Some(with(values)),
                None => tensor.into_data(), // a view, which has to be copied
            },
            Readable::Data(data) => data,
        };
        values(&data).map(with)
    }
}

fn values(data: &TensorData) -> Option<Values<'_>> {
    match data.dtype() {
        DType::F32 => data.as_slice().ok().map(Values::F32),
        DType::F64 => data.as_slice().ok().map(Values::F64),
        DType::F16 => data.as_slice().ok().map(Values::F16),
        DType::BF16 => data.as_slice().ok().map(Values::Bf16),
        _ => None,
    }
}

/// Tensors that are read together: a device is waited for once, and not once for each tensor. Each has the name of its
/// parameter.
#[derive(Default)]
pub(crate) struct Batch {
    items: Vec<(String, Item)>,
    transactions: Vec<OnDevice>,
    /// About the first tensor that is quantised. burn panics where its elements are asked for.
    quantized: Option<Error>,
}

/// Tensors of one device that is not the host.
struct OnDevice {
    device: Device,
    /// The name of the first of them.
    first: String,
    transaction: Transaction,
}

enum Item {
    Here(FlexTensor),
    /// The next tensor of this transaction.
    In(usize),
}

impl Batch {
    /// Adds a tensor without autodiff.
    pub(crate) fn add<const D: usize>(&mut self, name: &str, tensor: Tensor<D>) {
        if let dtype @ DType::QFloat(_) = tensor.dtype() {
            let (name, dtype) = (name.to_owned(), format!("{dtype:?}"));
            self.quantized.get_or_insert(failure::unsupported_dtype(name, dtype));
            return;
        }
        let device = tensor.device().without_autodiff();
        if is_flex(&device) {
            match Dispatch::stored(tensor.into_dispatch()) {
                Stored::Here(tensor) => self.items.push((name.to_owned(), Item::Here(tensor))),
                #[cfg(feature = "gpu")]
                Stored::OnDevice(_) => unreachable!("flex tensors are in the host's memory"),
            }
            return;
        }
        let at = self.transactions.iter().position(|on| on.device == device).unwrap_or_else(|| {
            let (first, transaction) = (name.to_owned(), Transaction::default());
            self.transactions.push(OnDevice { device, first, transaction });
            self.transactions.len() - 1
        });
        let OnDevice { transaction, .. } = &mut self.transactions[at];
        *transaction = std::mem::take(transaction).register(tensor);
        self.items.push((name.to_owned(), Item::In(at)));
    }

    /// The tensors with their names, in the order in which they were added. Waits for their devices.
    ///
    /// # Errors
    ///
    /// [`Device`](crate::ErrorKind::Device) names the first tensor of a device that cannot be read, [`Model`](crate::ErrorKind::Model) one that is
    /// quantised.
    pub(crate) fn read(self) -> Result<Vec<(String, Readable)>> {
        if let Some(error) = self.quantized {
            return Err(error);
        }
        let read = |OnDevice { device, first: name, transaction }| match transaction.try_execute() {
            Ok(data) => Ok(data.into_iter()),
            Err(error) => {
                let device = device_name(&device);
                Err(failure::device(name, device, error.to_string()))
            }
        };
        let mut read = self.transactions.into_iter().map(read).collect::<Result<Vec<_>>>()?;
        let tensors = self.items.into_iter().filter_map(|(name, item)| match item {
            Item::Here(tensor) => Some((name, Readable::Flex(tensor))),
            Item::In(at) => read[at].next().map(|data| (name, Readable::Data(data))),
        });
        Ok(tensors.collect())
    }
}

/// The value of a parameter.
pub(crate) struct ParameterValue {
    pub(crate) slot: usize,
    pub(crate) name: String,
    pub(crate) value: Readable,
}

/// The values of those parameters of `model` for whose names `slot_of` knows a slot. Waits for their devices.
pub(crate) fn parameter_values<M: Module>(
    model: &M,
    slot_of: &dyn Fn(&str) -> Option<usize>,
) -> Result<Vec<ParameterValue>> {
    let mut found = Found { slot_of, slots: Vec::new(), batch: Batch::default() };
    visit_floats(model, &mut found);
    let values = found.slots.into_iter().zip(found.batch.read()?);
    Ok(values.map(|(slot, (name, value))| ParameterValue { slot, name, value }).collect())
}

struct Found<'a> {
    slot_of: &'a dyn Fn(&str) -> Option<usize>,
    slots: Vec<usize>,
    batch: Batch,
}

impl VisitFloat for Found<'_> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        let Some(slot) = (self.slot_of)(name) else { return };
        let value = param.base();
        self.slots.push(slot);
        self.batch.add(name, if value.is_autodiff() { value.inner() } else { value });
    }
}
