//! Pages of a Parquet column, checked between decompression and decoding.

use std::fs::File;
use std::sync::Arc;

use parquet::basic::Encoding;
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::ColumnChunkMetaData;
use parquet::file::serialized_reader::SerializedPageReader;

use super::delta_text;

/// Reads the pages of a column and refuses delta-encoded text that declares more than its page can hold.
pub struct CheckedPages {
    pages: SerializedPageReader<File>,
    has_repetition: bool,
    has_definition: bool,
}

/// Bytes of the delta-encoded texts of a column.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeltaTextSizes {
    /// Of the largest page, and of all pages.
    pub largest: u64,
    pub total: u64,
}

impl CheckedPages {
    pub fn new(file: Arc<File>, chunk: &ColumnChunkMetaData, rows: usize) -> Result<Self> {
        let column = chunk.column_descr();
        Ok(Self {
            pages: SerializedPageReader::new(file, chunk, rows, None)?,
            has_repetition: column.max_rep_level() > 0,
            has_definition: column.max_def_level() > 0,
        })
    }

    /// Reads all pages, to find how much text they decode to.
    pub fn delta_text_sizes(mut self) -> Result<DeltaTextSizes> {
        let mut sizes = DeltaTextSizes::default();
        while let Some(page) = self.pages.get_next_page()? {
            let bytes = self.check(&page)?;
            sizes.largest = sizes.largest.max(bytes);
            sizes.total += bytes;
        }
        Ok(sizes)
    }

    /// Bytes of the texts of a page with delta encoding; 0 for others.
    fn check(&self, page: &Page) -> Result<u64> {
        let measure: fn(&[u8], u64) -> std::io::Result<u64> = match page.encoding() {
            Encoding::DELTA_LENGTH_BYTE_ARRAY => delta_text::length_encoded_bytes,
            Encoding::DELTA_BYTE_ARRAY => delta_text::prefix_encoded_bytes,
            _ => return Ok(0),
        };
        let values = match page {
            Page::DataPage { buf, .. } => {
                let mut rest = &buf[..];
                for _ in 0..usize::from(self.has_repetition) + usize::from(self.has_definition) {
                    let length = rest.split_first_chunk::<4>();
                    let (length, levels) = length.ok_or_else(truncated_levels)?;
                    rest = levels.get(u32::from_le_bytes(*length) as usize..).ok_or_else(truncated_levels)?;
                }
                rest
            }
            Page::DataPageV2 { buf, def_levels_byte_len, rep_levels_byte_len, .. } => {
                let levels = *def_levels_byte_len as usize + *rep_levels_byte_len as usize;
                buf.get(levels..).ok_or_else(truncated_levels)?
            }
            Page::DictionaryPage { .. } => return Ok(0),
        };
        Ok(measure(values, page.num_values().into())?)
    }
}

fn truncated_levels() -> ParquetError {
    ParquetError::EOF("the levels of a page extend beyond it".into())
}

impl PageReader for CheckedPages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        let page = self.pages.get_next_page()?;
        if let Some(page) = &page {
            self.check(page)?;
        }
        Ok(page)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.pages.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.pages.skip_next_page()
    }
}

impl Iterator for CheckedPages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}
