//! burn's records, which are bytes, as tensors of a checkpoint and back.

use std::collections::BTreeMap;

use burn::tensor::{self, Bytes};
use burn_pack::{Reader, Scalar, Writer};
use drumline::{DType, checkpoint::Tensor};

/// A record: named tensors and numbers, and notes beside them.
#[derive(Default)]
pub(super) struct Record {
    /// In the order of their names.
    pub(super) entries: BTreeMap<String, Entry>,
    pub(super) notes: BTreeMap<String, String>,
}

/// An entry of a record.
pub(super) enum Entry {
    Scalar(Scalar),
    Tensor { dtype: tensor::DType, shape: Vec<usize>, bytes: Vec<u8>, parameter: Option<u64> },
}

impl Record {
    pub(super) fn from_bytes(bytes: Bytes) -> Result<Self, String> {
        let reader = Reader::from_bytes(bytes).map_err(|error| error.to_string())?;
        let scalars = reader.scalars().iter();
        let mut entries: BTreeMap<_, _> =
            scalars.map(|(name, value)| (name.clone(), Entry::Scalar(*value))).collect();
        let notes = reader.metadata().clone();
        for tensor in reader.into_tensors().map_err(|error| error.to_string())? {
            let (name, dtype, shape, parameter, bytes) =
                tensor.into_parts().map_err(|error| error.to_string())?;
            let (shape, bytes) = (shape.to_vec(), bytes.to_vec());
            entries.insert(name, Entry::Tensor { dtype, shape, bytes, parameter });
        }
        Ok(Self { entries, notes })
    }

    pub(super) fn into_bytes(self) -> Result<Bytes, String> {
        let (mut tensors, mut scalars) = (Vec::new(), Vec::new());
        for (name, entry) in self.entries {
            match entry {
                Entry::Scalar(value) => scalars.push((name, value)),
                Entry::Tensor { dtype, shape, bytes, parameter } => {
                    let bytes = Bytes::from_bytes_vec(bytes);
                    tensors.push(burn_pack::Tensor::new(name, dtype, shape, parameter, bytes));
                }
            }
        }
        let mut writer = Writer::new(tensors);
        for (name, value) in &scalars {
            writer = writer.with_scalar(name, *value);
        }
        for (name, note) in &self.notes {
            writer = writer.with_metadata(name, note);
        }
        writer.into_bytes().map_err(|error| error.to_string())
    }
}

impl Entry {
    /// As a tensor of a checkpoint. A number is a tensor without dimensions; a negative integer, which no
    /// optimizer of burn has, has one dimension, because without dimensions all integers are unsigned.
    pub(super) fn into_tensor(self, name: String) -> Result<Tensor, String> {
        let tensor = match self {
            Entry::Scalar(Scalar::UInt(value)) => {
                Tensor::from_values(name, [], &[value.cast_signed()])
            }
            Entry::Scalar(Scalar::Int(value)) if value >= 0 => {
                Tensor::from_values(name, [], &[value])
            }
            Entry::Scalar(Scalar::Int(value)) => Tensor::from_values(name, [1], &[value]),
            Entry::Scalar(Scalar::Float(value)) => Tensor::from_values(name, [], &[value]),
            Entry::Scalar(Scalar::Bool(value)) => Tensor::from_values(name, [], &[u8::from(value)]),
            Entry::Tensor { dtype, shape, bytes, .. } => {
                let dtype = to_drumline(dtype).ok_or_else(|| {
                    format!("{name} is {dtype:?}, which a checkpoint cannot hold")
                })?;
                Tensor::new(name, dtype, shape, bytes)
            }
        };
        tensor.map_err(|error| error.to_string())
    }

    /// The reverse of [`into_tensor`](Self::into_tensor), for an entry that belongs to `parameter`.
    pub(super) fn from_tensor(tensor: &Tensor, parameter: Option<u64>) -> Result<Self, String> {
        let integer = || tensor.values::<i64>().ok().and_then(|values| values.first().copied());
        let scalar = match (tensor.dtype(), tensor.shape()) {
            (DType::I64, []) => integer().map(|value| Scalar::UInt(value.cast_unsigned())),
            (DType::I64, [1]) => integer().map(Scalar::Int),
            (DType::F64, []) => {
                tensor.values().ok().and_then(|v: Vec<f64>| v.first().copied()).map(Scalar::Float)
            }
            (DType::U8, []) => tensor.bytes().first().map(|byte| Scalar::Bool(*byte != 0)),
            _ => None,
        };
        if let Some(scalar) = scalar {
            return Ok(Entry::Scalar(scalar));
        }
        let dtype = to_burn(tensor.dtype()).ok_or_else(|| {
            format!("{} is {}, which no state of burn has", tensor.name(), tensor.dtype())
        })?;
        let (shape, bytes) = (tensor.shape().to_vec(), tensor.bytes().to_vec());
        Ok(Entry::Tensor { dtype, shape, bytes, parameter })
    }
}

/// The types of floating-point tensors, which optimizers keep.
const DTYPES: [(tensor::DType, DType); 4] = [
    (tensor::DType::F32, DType::F32),
    (tensor::DType::F64, DType::F64),
    (tensor::DType::F16, DType::F16),
    (tensor::DType::BF16, DType::Bf16),
];

fn to_drumline(dtype: tensor::DType) -> Option<DType> {
    DTYPES.into_iter().find(|(burn, _)| *burn == dtype).map(|(_, ours)| ours)
}

fn to_burn(dtype: DType) -> Option<tensor::DType> {
    DTYPES.into_iter().find(|(_, ours)| *ours == dtype).map(|(burn, _)| burn)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_back_as_they_were() {
        let scalars = [
            Scalar::UInt(7),
            Scalar::UInt(u64::MAX), // a scheduler of burn before its first step
            Scalar::Int(-3),
            Scalar::Float(0.1),
            Scalar::Bool(true),
        ];
        for scalar in scalars {
            let tensor = Entry::Scalar(scalar).into_tensor("it".into()).unwrap();
            let Entry::Scalar(back) = Entry::from_tensor(&tensor, None).unwrap() else {
                panic!("{scalar:?} became a tensor")
            };
            assert_eq!(back, scalar);
        }
        let entry = Entry::Tensor {
            dtype: tensor::DType::BF16,
            shape: vec![1, 2],
            bytes: vec![1, 2, 3, 4],
            parameter: Some(9),
        };
        let tensor = entry.into_tensor("it".into()).unwrap();
        let back = Entry::from_tensor(&tensor, Some(9)).unwrap();
        let mut record = Record::default();
        record.entries.insert("9.it".into(), back);
        record.notes.insert("9".into(), "fc.weight".into());
        let back = Record::from_bytes(record.into_bytes().unwrap()).unwrap();
        assert_eq!(back.notes["9"], "fc.weight");
        let Entry::Tensor { dtype, shape, bytes, parameter } = &back.entries["9.it"] else {
            panic!("a tensor became a scalar")
        };
        assert_eq!((*dtype, &shape[..], *parameter), (tensor::DType::BF16, &[1, 2][..], Some(9)));
        assert_eq!(bytes, &[1, 2, 3, 4]);
    }
}
