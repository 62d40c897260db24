//! Writes GGUF files (version 3): as much of the format as a small model needs.

use std::io::{self, Write};
use std::path::Path;

const VERSION: u32 = 3;
/// Tensor data begins and continues at multiples of this.
const ALIGNMENT: usize = 32;
const TENSOR_F32: u32 = 0;

/// A metadata value.
pub(crate) enum Value {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
}

impl Value {
    fn kind(&self) -> u32 {
        match self {
            Self::U32(_) => 4,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Text(_) => 8,
            Self::Texts(_) | Self::I32s(_) => 9,
        }
    }

    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::U32(value) => out.extend(value.to_le_bytes()),
            Self::F32(value) => out.extend(value.to_le_bytes()),
            Self::Bool(value) => out.push(u8::from(*value)),
            Self::Text(value) => put_text(out, value),
            Self::Texts(values) => {
                out.extend(8_u32.to_le_bytes());
                out.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| put_text(out, value));
            }
            Self::I32s(values) => {
                out.extend(5_u32.to_le_bytes());
                out.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| out.extend(value.to_le_bytes()));
            }
        }
    }
}

/// A file in the making.
#[derive(Default)]
pub(crate) struct Gguf {
    values: Vec<(String, Value)>,
    tensors: Vec<Tensor>,
}

struct Tensor {
    name: String,
    /// Innermost first, as the format wants it.
    dimensions: Vec<u64>,
    elements: Vec<f32>,
}

impl Gguf {
    /// Adds a metadata value.
    pub(crate) fn value(&mut self, key: &str, value: Value) -> &mut Self {
        self.values.push((key.to_owned(), value));
        self
    }

    /// Adds a tensor of 32-bit floats.
    pub(crate) fn tensor(
        &mut self,
        name: &str,
        dimensions: &[usize],
        elements: Vec<f32>,
    ) -> &mut Self {
        assert_eq!(dimensions.iter().product::<usize>(), elements.len(), "{name}");
        let dimensions = dimensions.iter().map(|length| *length as u64).collect();
        self.tensors.push(Tensor { name: name.to_owned(), dimensions, elements });
        self
    }

    /// Writes the file.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let mut out = b"GGUF".to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.values.len() as u64).to_le_bytes());
        for (key, value) in &self.values {
            put_text(&mut out, key);
            out.extend(value.kind().to_le_bytes());
            value.put(&mut out);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            put_text(&mut out, &tensor.name);
            out.extend(u32::try_from(tensor.dimensions.len()).unwrap().to_le_bytes());
            tensor.dimensions.iter().for_each(|length| out.extend(length.to_le_bytes()));
            out.extend(TENSOR_F32.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += (tensor.elements.len() * 4).next_multiple_of(ALIGNMENT);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
            tensor.elements.iter().for_each(|element| out.extend(element.to_le_bytes()));
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        std::fs::File::create(path)?.write_all(&out)
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}
