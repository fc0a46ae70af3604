//! The safetensors format: length of the header (u64, little-endian), header (JSON), elements.
//!
//! This module does not use the crate `safetensors`, for two reasons: that crate's files differ from
//! run to run (it writes metadata in the order of a hash map), and it needs the whole file in memory.
//! The tests compare the two.

use std::{collections::BTreeMap, fmt::Display, io::Read};

use drumline_kernels::DType;
use serde_json::{Map, Value, json};

use super::tensor::{Tensor, byte_length};

/// The format's own limit, in bytes.
const HEADER_LENGTH_MAX: u64 = 100_000_000;

const METADATA_KEY: &str = "__metadata__";

/// The tensors in the order of the format: largest elements first, so that all are aligned.
pub(super) fn file_order<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> Vec<&'a Tensor> {
    let mut tensors: Vec<_> = tensors.collect();
    tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype().size()));
    tensors
}

/// The bytes that come before the elements of `tensors`. The error says what is wrong.
pub(super) fn header(
    tensors: &[&Tensor],
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>, String> {
    // Ordered maps, so that equal checkpoints make equal files. serde_json's map may be unordered.
    let mut header = BTreeMap::from([(METADATA_KEY, json!(metadata))]);
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.bytes().len();
        let entry = BTreeMap::from([
            ("dtype", json!(name_of(tensor.dtype())?)),
            ("shape", json!(tensor.shape())),
            ("data_offsets", json!([start, end])),
        ]);
        if header.insert(tensor.name(), json!(entry)).is_some() {
            return Err(format!("a tensor cannot be called {METADATA_KEY}"));
        }
        start = end;
    }
    let mut text = serde_json::to_vec(&header).map_err(|error| error.to_string())?;
    text.resize(text.len().next_multiple_of(8), b' '); // Aligns the elements.
    let length = text.len() as u64;
    if length > HEADER_LENGTH_MAX {
        return Err("it has too many tensors or too much metadata for the format".into());
    }
    Ok([&length.to_le_bytes(), &text[..]].concat())
}

/// A tensor's entry in the header.
pub(super) struct TensorEntry {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    /// The bytes `start..end` hold its elements, counted from the end of the header.
    start: u64,
    end: u64,
}

/// The header, parsed.
pub(super) struct Header {
    /// The header and its length, as they are in the file.
    pub(super) bytes: Vec<u8>,
    /// The tensors in the order of their elements, which fill the rest of the file without gaps.
    pub(super) entries: Vec<TensorEntry>,
    pub(super) metadata: BTreeMap<String, String>,
}

/// Reads the header of a file of `file_length` bytes.
pub(super) fn parse_header(input: &mut impl Read, file_length: u64) -> Result<Header, String> {
    let mut length_bytes = [0; 8];
    input.read_exact(&mut length_bytes).map_err(|_| too_short(file_length))?;
    let length = u64::from_le_bytes(length_bytes);
    if length > HEADER_LENGTH_MAX {
        return Err("it is not a safetensors file: its header would be too long".into());
    }
    let elements_length =
        file_length.checked_sub(8 + length).ok_or_else(|| too_short(file_length))?;

    let mut text = vec![0; length as usize];
    input.read_exact(&mut text).map_err(|error| format!("its header is unreadable: {error}"))?;
    let header: Map<String, Value> = serde_json::from_slice(&text)
        .map_err(|error| format!("it is not a safetensors file: its header: {error}"))?;

    let mut metadata = BTreeMap::new();
    let mut entries = Vec::with_capacity(header.len());
    for (name, value) in header {
        if name == METADATA_KEY {
            metadata = serde_json::from_value(value)
                .map_err(|error| format!("it is damaged: its metadata: {error}"))?;
        } else {
            entries.push(parse_entry(name, &value)?);
        }
    }

    entries.sort_by_key(|entry| (entry.start, entry.end));
    let mut end = 0;
    for entry in &entries {
        if entry.start != end {
            return Err(format!("it is damaged: {} begins at the wrong place", entry.name));
        }
        end = entry.end;
    }
    if end != elements_length {
        return Err(format!(
            "it is cut short or damaged: it holds {elements_length} bytes of elements, \
             but its header describes {end}"
        ));
    }
    Ok(Header { bytes: [&length_bytes, &text[..]].concat(), entries, metadata })
}

impl TensorEntry {
    /// Reads the elements, which come next in `input`.
    pub(super) fn read_tensor(self, input: &mut impl Read) -> Result<Tensor, String> {
        let unreadable = |why: &dyn Display| format!("the elements of {} {why}", self.name);
        let length = self.end - self.start;
        // `parse_header` has checked that the entries fill the file exactly. But a file may be larger
        // than any memory, because holes take no place on a disk.
        let mut bytes = Vec::new();
        usize::try_from(length)
            .ok()
            .and_then(|length| bytes.try_reserve_exact(length).ok())
            .ok_or_else(|| {
                unreadable(&format_args!("take {length} bytes, more than memory has"))
            })?;
        let read = input.take(length).read_to_end(&mut bytes);
        let read = read.map_err(|error| unreadable(&format_args!("are unreadable: {error}")))?;
        if read as u64 != length {
            return Err(unreadable(&format_args!("are cut short: {read} bytes of {length}")));
        }
        Tensor::new(self.name, self.dtype, self.shape, bytes).map_err(|error| error.to_string())
    }
}

fn parse_entry(name: String, value: &Value) -> Result<TensorEntry, String> {
    let damaged = |what: &str| format!("it is damaged: the header has no valid {what} of {name}");
    let numbers = |key: &str| -> Option<Vec<u64>> {
        value.get(key)?.as_array()?.iter().map(Value::as_u64).collect()
    };
    let dtype = value.get("dtype").and_then(Value::as_str).ok_or_else(|| damaged("dtype"))?;
    let dtype = dtype_of(dtype)
        .ok_or_else(|| format!("{name} has elements of type {dtype}, which are not supported"))?;
    let shape: Option<Vec<usize>> = numbers("shape")
        .and_then(|shape| shape.into_iter().map(|length| usize::try_from(length).ok()).collect());
    let shape = shape.ok_or_else(|| damaged("shape"))?;
    let offsets = numbers("data_offsets").and_then(|offsets| <[u64; 2]>::try_from(offsets).ok());
    let [start, end] = offsets.ok_or_else(|| damaged("offsets"))?;
    if end.checked_sub(start) != byte_length(dtype, &shape).map(|length| length as u64) {
        return Err(damaged("length"));
    }
    Ok(TensorEntry { name, dtype, shape, start, end })
}

fn too_short(length: u64) -> String {
    format!("it is cut short: {length} bytes do not even hold its header")
}

/// The format's names of the types.
const DTYPES: [(DType, &str); 12] = [
    (DType::U8, "U8"),
    (DType::I8, "I8"),
    (DType::U16, "U16"),
    (DType::I16, "I16"),
    (DType::U32, "U32"),
    (DType::I32, "I32"),
    (DType::U64, "U64"),
    (DType::I64, "I64"),
    (DType::F16, "F16"),
    (DType::Bf16, "BF16"),
    (DType::F32, "F32"),
    (DType::F64, "F64"),
];

fn name_of(dtype: DType) -> Result<&'static str, String> {
    let found = DTYPES.iter().find(|(known, _)| *known == dtype);
    found.map(|(_, name)| *name).ok_or_else(|| format!("{dtype} has no name in safetensors"))
}

fn dtype_of(name: &str) -> Option<DType> {
    DTYPES.iter().find(|(_, known)| *known == name).map(|(dtype, _)| *dtype)
}
