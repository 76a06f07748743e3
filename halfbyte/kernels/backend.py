"""What ops calls where Triton runs: functions of `halfbyte.reference`, under the same names."""

from halfbyte.kernels.amax.error_sums import column_outliers as column_outliers
from halfbyte.kernels.amax.error_sums import error_sums as error_sums
from halfbyte.kernels.amax.error_sums import square_sum as square_sum
from halfbyte.kernels.amax.grouped_sum import grouped_token_sum as grouped_token_sum
from halfbyte.kernels.amax.plain import finite_amax as finite_amax
from halfbyte.kernels.amax.plain import row_col_amax as row_col_amax
from halfbyte.kernels.amax.token_sum import token_mean as token_mean
from halfbyte.kernels.amax.token_sum import token_sum as token_sum
from halfbyte.kernels.fused import activation_backward_with_amaxes as activation_backward_with_amaxes
from halfbyte.kernels.fused import activation_with_amaxes as activation_with_amaxes
from halfbyte.kernels.fused import norm_backward as norm_backward
from halfbyte.kernels.fused import norm_with_amaxes as norm_with_amaxes
from halfbyte.kernels.gemm.dense import gemm_nt as gemm_nt
from halfbyte.kernels.gemm.grouped import grouped_gemm_nt as grouped_gemm_nt
from halfbyte.kernels.gemm.grouped import grouped_gemm_nt_batch_invariant as grouped_gemm_nt_batch_invariant
from halfbyte.kernels.quantize.both import quantize_row_col as quantize_row_col
from halfbyte.kernels.quantize.grouped import grouped_quantize_row_col as grouped_quantize_row_col
from halfbyte.kernels.quantize.residual import quantize_residual as quantize_residual
from halfbyte.kernels.quantize.residual import quantize_with_sum as quantize_with_sum
from halfbyte.kernels.unpack.dequantize import decode as decode
from halfbyte.kernels.unpack.dequantize import dequantize as dequantize
from halfbyte.kernels.unpack.dequantize import from_values as from_values
from halfbyte.kernels.unpack.dequantize import plain as plain
from halfbyte.kernels.unpack.grouped_dequantize import grouped_dequantize as grouped_dequantize
from halfbyte.kernels.unpack.grouped_dequantize import grouped_values as grouped_values
from halfbyte.kernels.unpack.transpose import transpose as transpose
